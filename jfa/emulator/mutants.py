"""Mutants of a kernel: one synchronization statement wrong, on one path of calls.

A role waits through the methods of a ring; deleting the wait inside the method would break every role at
once. So a mutant names a chain of calls: only the call at its end meets the wrong statement, as if all
helpers were written out. A chain begins at the kernel or at a function that is handed over as an argument (a
role).
"""

import ast
import contextlib
import dataclasses

from .edits import Edit, edit, edits, replaced, statements
from .kernels import Kernel, mutated, reachable
from .names import Aggregate

DEPTH = 6  # calls in a chain
CUT = 56  # characters of a statement where it serves as a name


@dataclasses.dataclass(frozen=True)
class Mutant:
    """functions: the chain of Kernels; changes: an Edit for each, the calls and at last the wrong statement.

    owners: the class whose method a call goes to (None for a plain function), for each call of the chain.
    where: the names of the chain's functions. `key` names the mutant among those of its kernel, the same
    from run to run while the kernel stays as it is.
    """

    functions: tuple[Kernel, ...]
    changes: tuple[Edit, ...]
    owners: tuple[str | None, ...]
    where: str

    @property
    def key(self):
        return key(self.where, self.text, self.kind)

    @property
    def call(self):
        """The first call of the chain, a long one cut short, or "" if it has none."""
        return shortened(self.changes[0].text) if len(self.changes) > 1 else ""

    @property
    def kind(self):
        return self.changes[-1].kind

    @property
    def text(self):
        """The statement that is wrong."""
        return self.changes[-1].text

    @contextlib.contextmanager
    def active(self, reached=lambda: None):
        """While active, launches run the mutant; `reached()` is called at the wrong statement."""
        scope = {"__reached": reached}
        for function, change, owner in zip(self.functions[:0:-1], self.changes[:0:-1], self.owners[::-1]):
            clone = Kernel(function.function, function.lines, function.first_line)
            clone.source, clone.first_line = function.source, function.first_line  # the file may have changed
            clone.compile(change.apply if "__mutant" not in scope else _quiet(change))
            clone.scope.update(scope)
            scope = {"__mutant": _dispatch(clone, owner)}
        patch = self.changes[0].apply if "__mutant" not in scope else _quiet(self.changes[0])
        with mutated(self.functions[0].function, patch) as unit:
            unit.scope.update(scope)
            yield


def _quiet(change):
    return lambda source: change.apply(source, before="")


def _dispatch(clone, owner):
    """The clone; for a method only if the object is of its class, since others have methods of that name."""
    if owner is None:
        return clone

    def call(self, /, *args, **kwargs):
        own = type(self).__name__ == owner
        return clone(self, *args, **kwargs) if own else getattr(self, clone.__name__)(*args, **kwargs)

    return call


class Program:
    """The functions that one launch can reach, and how they call each other."""

    def __init__(self, root, arguments):
        self.functions = [f for f in reachable(root, arguments) if f.code is not None and _own(f)]
        self.trees = {f: ast.parse(f.source) for f in self.functions}
        self.methods = _methods(self.functions)
        self.edits = {f: edits(tree) for f, tree in self.trees.items()}
        self.calls = {f: self._calls(f) for f in self.functions}
        called = {callee for calls in self.calls.values() for _, _, callee in calls}
        owned = {method for pairs in self.methods.values() for _, method in pairs}
        self.units = [f for f in self.functions if f is root or f not in called | owned]

    def _calls(self, function):
        """(Edit that redirects the call, owner class or None, callee) of every call to a known function."""
        found = []
        for statement in statements(self.trees[function]):
            for call in ast.walk(statement):
                for new, owner, callee in self._callees(function, call):
                    found.append((edit(statement, "call", replaced(statement, call, new)), owner, callee))
        return found

    def _callees(self, function, call):
        if not isinstance(call, ast.Call):
            return
        rest = [ast.unparse(a) for a in call.args]
        rest += [
            f"{k.arg}={ast.unparse(k.value)}" if k.arg else f"**{ast.unparse(k.value)}" for k in call.keywords
        ]
        if isinstance(call.func, ast.Name):
            callee = function.scope.get(call.func.id) if call.func.id in function.bindings else None
            if isinstance(callee, Kernel) and callee in self.trees:
                yield f"__mutant({', '.join(rest)})", None, callee
        elif isinstance(call.func, ast.Attribute):
            for owner, callee in self.methods.get(call.func.attr, ()):
                if callee in self.trees and _fits(callee, call):
                    args = [ast.unparse(call.func.value), *rest]
                    yield f"__mutant({', '.join(args)})", owner, callee

    def mutants(self):
        """Every Mutant, in order of units and lines."""
        found = []
        for unit in self.units:
            self._extend(found, (unit,), (), ())
        return _named(found)

    def _extend(self, found, functions, changes, owners):
        here = functions[-1]
        for change in self.edits[here]:
            found.append((functions, (*changes, change), owners))
        if len(functions) < DEPTH:
            for change, owner, callee in self.calls[here]:
                if callee not in functions:
                    self._extend(found, (*functions, callee), (*changes, change), (*owners, owner))


def _own(function):
    """Whether a function belongs to the kernel's authors rather than to Triton."""
    return not function.function.__module__.startswith("triton.")


def _fits(method, call):
    """Whether a method takes as many arguments as a call gives: others of that name are not meant."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return True
    given = len(call.args) + len(call.keywords)
    needed = [p for p in method.params[1:] if p.default is p.empty]
    return len(needed) <= given <= len(method.params) - 1


def _methods(functions):
    """{method name: [(class name, Kernel)]} of the aggregates that the functions know."""
    classes = set()
    todo = [v for f in functions for v in f.scope.values()]
    for value in todo:
        if isinstance(value, type) and issubclass(value, Aggregate):
            classes.add(value)
    known = set(functions)
    found = {}
    for cls in sorted(classes, key=lambda cls: cls.__name__):
        for name, method in cls.methods.items():
            if method in known:
                found.setdefault(name, []).append((cls.__name__, method))
    return found


def key(where, line, kind):
    """Name of a mutant: the chain of functions, the statement (a long one cut short), what is wrong."""
    return f"{where}: {shortened(line)} | {kind}"


def shortened(text):
    """A statement in at most CUT characters."""
    return text if len(text) <= CUT else text[: CUT - 3] + "..."


def _named(chains):
    """Mutants with names; where two would have the same, they are numbered."""
    counts = {}
    mutants = []
    for functions, changes, owners in chains:
        where = " > ".join(function.function.__qualname__ for function in functions)
        name = key(where, changes[-1].text, changes[-1].kind)
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > 1:
            where += f" #{counts[name]}"
        mutants.append(Mutant(functions, changes, owners, where))
    return mutants
