"""Kernel source as a reader wants it: one function, or what changed from one step to the next."""

import ast
import dataclasses
import difflib
import inspect
import io
import sys
import textwrap
import tokenize

# Fields of a step that describe it to a reader; they are no part of the kernel.
DESCRIPTIVE = frozenset({"name", "idea", "title", "notebook", "summary", "changes", "paper", "doc"})


class Source(str):
    """Source text that a notebook shows as plain text, line by line."""

    def _repr_pretty_(self, printer, cycle):
        printer.text(str(self))


class Diff(Source):
    """A unified diff; ``added`` and ``removed`` count its lines, comments and blank lines included."""

    @property
    def added(self):
        """Number of lines that are new."""
        return sum(line.startswith("+") and not line.startswith("+++") for line in self.splitlines())

    @property
    def removed(self):
        """Number of lines that are gone."""
        return sum(line.startswith("-") and not line.startswith("---") for line in self.splitlines())


def _plain(fn):
    """The Python object whose source is wanted: inside jit, autotune and heuristics, out of an aggregate."""
    if getattr(fn, "__triton_aggregate__", False):
        return _class_of_aggregate(fn)
    seen = set()
    while not inspect.isroutine(fn) and not inspect.isclass(fn) and hasattr(fn, "fn") and id(fn) not in seen:
        seen.add(id(fn))
        fn = fn.fn
    return inspect.unwrap(fn)


def _class_of_aggregate(aggregate):
    """A stand-in for the class statement of a triton.aggregate: by one of its methods, else by its module."""
    members = [getattr(member, "fn", member) for member in aggregate.hash_attrs]
    members += [value for value in vars(aggregate).values() if hasattr(value, "hash_attrs")]
    for member in members:
        code = getattr(member, "__code__", None)
        if code is not None and getattr(member, "__qualname__", "").startswith(aggregate.__qualname__ + "."):
            return _Class(aggregate.__name__, code)
    return _Class(aggregate.__name__, sys.modules[aggregate.__module__])


@dataclasses.dataclass(frozen=True)
class _Class:
    name: str
    where: object

    def text(self):
        lines, _ = inspect.findsource(self.where)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == self.name:
                first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
                if first <= getattr(self.where, "co_firstlineno", first) <= node.end_lineno:
                    return "".join(lines[first - 1 : node.end_lineno])
        raise OSError(f"source of class {self.name} not found")


def source(fn):
    """Source text of a jit function, plain function, class or triton.aggregate, decorators included.

    Works for functions defined in notebook cells, also for one that was defined again since. Raises TypeError
    for an object without source.
    """
    if fn is None:
        return Source("")
    recorded = getattr(fn, "raw_src", None)
    if recorded is not None:
        return Source(textwrap.dedent("".join(recorded)))
    found = _plain(fn)
    try:
        text = found.text() if isinstance(found, _Class) else inspect.getsource(found)
    except (OSError, TypeError) as error:
        raise TypeError(f"no source for {fn!r}: {error}") from error
    return Source(textwrap.dedent(text))


def _name(fn):
    if fn is None:
        return "(nothing)"
    return getattr(fn, "__name__", None) or getattr(_plain(fn), "__name__", repr(fn))


def _unified(before, after, name_before, name_after, context):
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), name_before, name_after, lineterm="", n=context
    )
    return "\n".join(lines)


def diff(a, b, context=3):
    """Unified diff from function ``a`` to function ``b`` with ``context`` lines around each change.

    Either may be a jit function, plain function, class, aggregate, a Source, or None for nothing.
    """
    texts = [item if isinstance(item, str) else source(item) for item in (a, b)]
    names = ["before" if isinstance(a, str) else _name(a), "after" if isinstance(b, str) else _name(b)]
    return Diff(_unified(*texts, *names, context))


def code_lines(text):
    """Lines of Python that do something: no comments, docstrings or blank lines, trailing spaces cut."""
    text = textwrap.dedent(text)
    hidden = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                hidden.update(range(first.lineno, first.end_lineno + 1))
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return [line.rstrip() for row, line in enumerate(lines, 1) if row not in hidden and line.strip()]


def _is_code(value):
    decorated = hasattr(value, "raw_src") or hasattr(value, "fn")
    return decorated or inspect.isfunction(value) or getattr(value, "__triton_aggregate__", False)


def _parts(value, path=""):
    """Leaves of a step by dotted path: roles and configuration values, descriptive fields left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        items = [(name, item) for name, item in fields if path or name not in DESCRIPTIVE]
    elif isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (tuple, list)) and any(_is_code(item) for item in value):
        items = list(enumerate(value))
    else:
        return {path: value}
    found = {}
    for name, item in items:
        found |= _parts(item, f"{path}.{name}" if path else str(name))
    return found


def reachable(fn, found=None):
    """Jit functions and aggregates that ``fn`` calls by global name, and that those call, by full name.

    Triton's own are left out. Names mean what they mean now, also where a notebook cell defined them anew.
    """
    found = {} if found is None else found
    members = fn.hash_attrs if hasattr(fn, "hash_attrs") else [fn]
    for member in members:
        plain = getattr(member, "fn", member)
        code, scope = getattr(plain, "__code__", None), getattr(plain, "__globals__", {})
        if code is None:
            continue
        names = [*code.co_names, *code.co_freevars]
        modules = [scope[name] for name in names if inspect.ismodule(scope.get(name))]
        values = [scope.get(name) for name in names]
        values += [vars(module).get(name) for module in modules for name in names]
        for value in values:
            kernel_code = hasattr(value, "raw_src") or getattr(value, "__triton_aggregate__", False)
            if not kernel_code or value.__module__.split(".")[0] == "triton":
                continue
            key = f"{value.__module__}.{value.__qualname__}"
            if key not in found:
                found[key] = value
                reachable(value, found)
    return found


def constants(fn):
    """Global constants that a jit function, or what it reaches, reads: (full name, value) as they are now."""
    found = {}
    for name, member in {"": fn, **reachable(fn)}.items():
        for one in getattr(member, "hash_attrs", [member]):
            plain = getattr(one, "fn", one)
            code, scope = getattr(plain, "__code__", None), getattr(plain, "__globals__", {})
            for used in code.co_names if code is not None else ():
                value = scope.get(used)
                if type(value).__name__ == "constexpr" or isinstance(value, (bool, int, float, str, tuple)):
                    found[f"{name}:{used}"] = repr(value)
    return sorted(found.items())


def _code_of(step):
    """(roles by field path, helpers by full name that roles reach and that are no roles)."""
    roles = {path: value for path, value in _parts(step).items() if _is_code(value)}
    helpers = {}
    for role in roles.values():
        reachable(role, helpers)
    own = {id(role) for role in roles.values()}
    return roles, {name: helper for name, helper in helpers.items() if id(helper) not in own}


def _changes(step_a, step_b):
    """(label, before, after) of every role, helper and configuration value that differs; code as text."""
    (roles_a, helpers_a), (roles_b, helpers_b) = _code_of(step_a), _code_of(step_b)
    changes = []
    for path in dict.fromkeys([*roles_a, *roles_b]):
        a, b = roles_a.get(path), roles_b.get(path)
        if a is not b and source(a) != source(b):
            changes.append((path, a, b))
    for name in dict.fromkeys([*helpers_a, *helpers_b]):
        a, b = helpers_a.get(name), helpers_b.get(name)
        if a is not b and source(a) != source(b):
            changes.append((name.rsplit(".", 1)[-1], a, b))
    values_a, values_b = ({p: v for p, v in _parts(s).items() if not _is_code(v)} for s in (step_a, step_b))
    missing = object()
    settings = []
    for path in dict.fromkeys([*values_a, *values_b]):
        a, b = values_a.get(path, missing), values_b.get(path, missing)
        if (path in roles_a or path in roles_b) or (a is b) or repr(a) == repr(b):
            continue
        settings.append((path, None if a is missing else repr(a), None if b is missing else repr(b)))
    return changes, settings


def step_diff(step_a, step_b, context=3):
    """What turns one step into the next: changed settings, then the diff of every changed role or helper.

    Steps are dataclasses (nested ones, dicts and tuples too) whose fields hold roles and configuration
    values. Helpers are jit functions and aggregates that the roles call. Descriptive fields (name, idea,
    notebook) are left out.
    """
    changes, settings = _changes(step_a, step_b)
    blocks = []
    for path, before, after in settings:
        blocks += [f"-{path} = {before}"] * (before is not None) + [f"+{path} = {after}"] * (
            after is not None
        )
    for label, before, after in changes:
        names = [f"{label}: {_name(item)}" for item in (before, after)]
        blocks.append(_unified(source(before), source(after), *names, context))
    return Diff("\n".join(blocks))


def changed_lines(step_a, step_b):
    """Number of code lines added and removed between two steps, in roles, their helpers and settings.

    Comments, docstrings and blank lines do not count; a changed setting counts as one line out and one in.
    """
    changes, settings = _changes(step_a, step_b)
    count = sum((before is not None) + (after is not None) for _, before, after in settings)
    for _, before, after in changes:
        old, new = code_lines(source(before)), code_lines(source(after))
        blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        count += sum(i2 - i1 + j2 - j1 for kind, i1, i2, j1, j2 in blocks if kind != "equal")
    return count
