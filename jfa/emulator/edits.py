"""Wrong versions of one synchronization statement: what a mutation test may do to a line of a kernel."""

import ast
import copy
import dataclasses
import re

DELETED = {  # operations whose whole statement goes, and what that is called
    "barrier_wait": "delete wait",
    "barrier_arrive": "delete arrive",
    "barrier_expect_bytes": "delete expect bytes",
    "named_barrier_wait": "delete named barrier wait",
    "named_barrier_arrive": "delete named barrier arrive",
    "tcgen05_commit": "delete commit",
    "async_descriptor_store_wait": "delete store wait",
    "fence": "delete fence",
    "fence_async_shared": "delete fence",
    "fence_mbarrier_init_cluster": "delete fence",
    "cluster_barrier": "delete cluster barrier",
    "cluster_arrive": "delete cluster barrier",
    "cluster_wait": "delete cluster barrier",
    "clc_producer": "delete request",
}
PASSED_ON = {"async_dot_wait": "MMA wait", "async_load_wait_group": "load wait"}  # f(n, x) gives x
PHASED = {"barrier_wait": (1, "phase"), "clc_producer": (1, "phase"), "clc_consumer": (1, "phase")}
COUNTED = {"async_descriptor_store_wait": "store wait", **PASSED_ON}  # f(n): at most n may stay in flight
NAMESPACES = ("tlx", "tl")


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replaces one statement of a function: its place in the source, and the text that comes instead.

    kind: what is wrong afterwards. text: the statement as it was. start and end: (line, column), from 1 and
    0.
    """

    kind: str
    text: str
    new: str
    start: tuple[int, int]
    end: tuple[int, int]

    def apply(self, source, before="__reached(); "):
        """The source with the statement replaced, on as many lines as before."""
        lines = source.split("\n")
        first, last = self.start[0] - 1, self.end[0] - 1
        tail = lines[last].encode()[self.end[1] :].decode()
        head = lines[first].encode()[: self.start[1]].decode()
        lines[first] = head + before + self.new + tail
        lines[first + 1 : last + 1] = [""] * (last - first)
        return "\n".join(lines)


def operation(node):
    """Name of the tl or tlx operation that a Call calls, or None."""
    func = node.func if isinstance(node, ast.Call) else None
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id in NAMESPACES:
        return func.attr
    return None


def statements(tree):
    """Simple statements of a function, in order of lines: those that may hold calls."""
    kinds = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def replaced(statement, call, new):
    """The statement's text with one call (a node of it) replaced by the source text `new`."""
    spot = next(i for i, node in enumerate(ast.walk(statement)) if node is call)
    twin = copy.deepcopy(statement)
    target = list(ast.walk(twin))[spot]
    swap = _Swap(target, ast.parse(new, mode="eval").body)
    return ast.unparse(ast.fix_missing_locations(swap.visit(twin)))


class _Swap(ast.NodeTransformer):
    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)


def edit(statement, kind, new):
    """The Edit that puts `new` in the place of a statement."""
    start = (statement.lineno, statement.col_offset)
    end = (statement.end_lineno, statement.end_col_offset)
    return Edit(kind, ast.unparse(statement), new, start, end)


def edits(tree):
    """Every Edit of the synchronization statements of a function (its syntax tree)."""
    found = []
    for statement in statements(tree):
        for call in ast.walk(statement):
            op = operation(call)
            if op is not None:
                found += [edit(statement, kind, new) for kind, new in _wrong(statement, call, op)]
    return found


def _wrong(statement, call, op):
    """(kind, new text of the statement) of every way to get this call wrong."""
    alone = isinstance(statement, ast.Expr) and statement.value is call
    if op in DELETED and alone:
        yield DELETED[op], "pass"
    if op in PASSED_ON and len(call.args) > 1:
        yield f"delete {PASSED_ON[op]}", replaced(statement, call, ast.unparse(call.args[1]))
    if op in PHASED:
        place, name = PHASED[op]
        yield from _altered(statement, call, place, name, "flip phase", "({}) ^ 1")
    if op in COUNTED:
        yield from _altered(statement, call, 0, None, f"weaken {COUNTED[op]}", "({}) + 1")
    if op == "barrier_expect_bytes":
        yield from _altered(statement, call, 1, "size", "double bytes", "({}) * 2")
        yield from _altered(statement, call, 1, "size", "halve bytes", "({}) // 2")
    if op == "barrier_arrive" and alone:
        text = ast.unparse(statement)
        yield "arrive twice", f"{text}; {text}"
    if op == "inline_asm_elementwise":
        yield from _assembly(statement, call)
    for keyword in call.keywords:
        if keyword.arg == "mBarriers" and isinstance(keyword.value, (ast.List, ast.Tuple)):
            for i, barrier in enumerate(keyword.value.elts):
                rest = [x for j, x in enumerate(keyword.value.elts) if j != i]
                value = ast.unparse(ast.List(rest, ast.Load()))
                new = _with_keyword(call, "mBarriers", value)
                yield f"drop signal {ast.unparse(barrier)}", replaced(statement, call, new)
        if keyword.arg == "sem" and isinstance(keyword.value, ast.Constant):
            if keyword.value.value != "relaxed":
                yield "relax atomic", replaced(statement, call, _with_keyword(call, "sem", "'relaxed'"))


def _altered(statement, call, place, name, kind, form):
    """The call with one argument (by place or name) put into `form`."""
    twin = copy.deepcopy(call)
    if len(call.args) > place:
        twin.args[place] = ast.parse(form.format(ast.unparse(call.args[place])), mode="eval").body
        yield kind, replaced(statement, call, ast.unparse(twin))
        return
    for keyword in call.keywords:
        if keyword.arg == name:
            new = _with_keyword(call, name, form.format(ast.unparse(keyword.value)))
            yield kind, replaced(statement, call, new)


def _with_keyword(call, name, value):
    twin = copy.deepcopy(call)
    for keyword in twin.keywords:
        if keyword.arg == name:
            keyword.value = ast.parse(value, mode="eval").body
    return ast.unparse(twin)


def _assembly(statement, call):
    """Inline PTX that orders memory: gone (its first input comes back), or half of it.

    Half of it: a wait for the read only, or a wait without the fence behind it.
    """
    text = next((a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)), "")
    match = re.search(r"\b(fence|membar|cp\.async\.bulk\.wait_group)\b", text)
    if match is None:
        return
    kind = "store wait" if "wait_group" in match[1] else "fence"
    inputs = next((a for a in call.args if isinstance(a, ast.List)), None)
    if inputs is not None and inputs.elts:
        yield f"delete {kind}", replaced(statement, call, ast.unparse(inputs.elts[0]))
    if kind == "store wait" and ".read" not in text:
        weak = text.replace("wait_group", "wait_group.read")
        yield "weaken store wait", replaced(statement, call, _with_text(call, text, weak))
    unfenced = re.sub(r"\b(fence|membar)[^;]*;\s*", "", text)
    if kind == "store wait" and unfenced != text:
        yield "delete fence", replaced(statement, call, _with_text(call, text, unfenced))


def _with_text(call, old, new):
    """The call with another string in the place of one of its arguments."""
    twin = copy.deepcopy(call)
    next(a for a in twin.args if isinstance(a, ast.Constant) and a.value == old).value = new
    return ast.unparse(twin)
