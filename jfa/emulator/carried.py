"""Names that Triton's front end loses in a loop, though Python carries them.

To learn which names a loop carries, the front end visits its body once with the values from before the loop
and keeps the names whose value is another one afterwards. A name that starts as a plain copy of a second
name, and that the body sets to that name again before the second one moves on, has the same value before and
after this visit: it is not carried, and the compiled kernel keeps its first value for ever, silently.

    before = tile
    while t < items:
        use(tile, before)      # compiled: before is the first tile, always
        before = tile
        tile = fetch(t)

Seen on an H200 as a hang. The check reads the source: plain copies in the block that holds the loop, and
assignments at the top level of its body.
"""

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Lost:
    """``name`` copies ``source`` before the loop and in it; lines of the function's file."""

    name: str
    source: str
    line: int
    loop_line: int

    def __str__(self):
        return (
            f"{self.name} is not carried by the loop at line {self.loop_line}: it starts as a copy of "
            f"{self.source} and is set to it again at line {self.line}, so Triton compiles it as a constant; "
            f"start it with a value of its own"
        )


def lost_carries(source: str, first_line: int = 1) -> list[Lost]:
    """All names that loops of a function's source lose."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                found += _in_block(block, first_line - 1)
    return found


def _in_block(block, shift):
    aliases = {}  # name -> the value that it holds, as the name that held it first
    for statement in block:
        if isinstance(statement, (ast.While, ast.For)) and not _is_static(statement):
            yield from _in_loop(statement, aliases, shift)
        copies = dict(_copies(statement))
        roots = {name: aliases.get(source, source) for name, source in copies.items()}
        for name in _stored(statement) - set(copies):
            aliases = {a: root for a, root in aliases.items() if name not in (a, root)}
        aliases |= roots


def _in_loop(loop, aliases, shift):
    moved = set()
    for index, statement in enumerate(loop.body):
        for name, source in _copies(statement):
            alike = aliases.get(name, name) == aliases.get(source, source)
            later = set().union(*(_stored(rest) for rest in loop.body[index + 1 :]), set())
            once = sum(name in _stored(other) for other in loop.body) == 1
            if name != source and alike and source not in moved and source in later and once:
                yield Lost(name, source, statement.lineno + shift, loop.lineno + shift)
        moved |= _stored(statement)


def _copies(statement):
    """(name, source) of the plain copies in an assignment."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return
    target, value = statement.targets[0], statement.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = list(zip(target.elts, value.elts, strict=True))
    for left, right in pairs:
        if isinstance(left, ast.Name) and isinstance(right, ast.Name):
            yield left.id, right.id


def _stored(node):
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


def _is_static(loop):
    call = loop.iter if isinstance(loop, ast.For) else None
    return isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "static_range"
