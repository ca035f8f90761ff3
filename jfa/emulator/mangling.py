"""One compiled function for two kinds of barriers, which Python never sees.

TLX compiles a jit function once for all calls whose arguments have the same mangled types, and the mangled
type of an mbarrier does not say whether it is a warp barrier. So where ``release(k)`` and ``release(v)`` are
of one type but for this, the body that was compiled first serves both: either every thread arrives on a
barrier that counts one (an unspecified launch failure), or one thread on a barrier that counts all (a hang).

    release(k)    # k.empties = tlx.alloc_warp_barrier(2, num_warps=4)
    release(v)    # v.empties = tlx.alloc_barriers(2): 128 arrivals on a count of 1

The check looks at the calls that an arrive runs in. Their keys are at least as fine as the compiler's: a
Python number in a plain argument may be a constexpr or what a loop carries, so a call with one is skipped.
"""

import sys

from .barriers import BarrierArray, MBarrier
from .context import CTX
from .descriptor import Descriptor
from .kernels import Kernel, is_kernel_code
from .memory import Buffer
from .names import Aggregate, map_value
from .tile import Tensor

LOOKS = 4  # at one arrive with one barrier in one chain of calls: a loop may change types in its first turns
WORDS = {True: "warp barrier", False: "plain barrier"}


class Unknown(Exception):
    """A value whose type in the compiler cannot be told."""


class Bodies:
    """The compiled functions of one launch that arrive on barriers which they are given."""

    def __init__(self, findings):
        self.findings = findings
        self.looks = {}  # (barrier array, call sites) -> how often seen
        self.first = {}  # (function, mangled arguments, place of the barrier) -> (kind, its name, call line)

    def note_arrive(self, task, bar):
        """``task`` arrives on ``bar`` in the functions that are on the Python stack."""
        frame = sys._getframe(2)
        sites = [bar.array.index]
        above = frame
        while above is not None:
            sites.append(above.f_lasti)
            sites.append(id(above.f_code))
            above = above.f_back
        sites = tuple(sites)
        looks = self.looks.get(sites, 0)
        if looks < LOOKS:
            self.looks[sites] = looks + 1
            self._look(task, frame, bar.array)

    def _look(self, task, frame, array):
        reported = False
        while frame is not None:
            if frame.f_code is Kernel.__call__.__code__:
                call = frame.f_locals
                lines = _lines(frame)
                for place, key in _places(call["self"], call["args"], call["kwargs"], array):
                    reported = self._compare(task, call["self"], key, place, array, lines, reported)
            frame = frame.f_back

    def _compare(self, task, function, key, place, array, lines, reported):
        """Whether it is reported; of functions that call each other only the innermost is."""
        kind, name, first_lines = self.first.setdefault(
            (function, key, place), (array.is_warp_barrier, array.name, lines)
        )
        if kind == array.is_warp_barrier or reported:
            return reported
        first, second = _where_they_differ(first_lines, lines)
        self.findings.add(
            "barrier kinds",
            f"{function.__name__} arrives on {name}, a {WORDS[kind]} (call at line {first}), and on "
            f"{array.name}, a {WORDS[array.is_warp_barrier]} (call at line {second}), in one compiled body: "
            f"a barrier's type does not tell them apart, so the first call decides whether every thread "
            f"arrives; let a constexpr argument or field differ",
            task=task,
            line=lines[-1] if lines else None,
            buffer=array.name,
            key=("barrier kinds", function, place, name, array.name),
        )
        return True


def _lines(frame):
    """Lines of kernel source that led to a call, the call's last."""
    lines = []
    while frame is not None:
        if is_kernel_code(frame.f_code):
            lines.append(frame.f_lineno)
        frame = frame.f_back
    return lines[::-1]


def _where_they_differ(first, second):
    """Two chains of lines as text, without what they begin with in common."""
    while len(first) > 1 and len(second) > 1 and first[0] == second[0]:
        first, second = first[1:], second[1:]
    return " > ".join(map(str, first)), " > ".join(map(str, second))


def _places(function, args, kwargs, array):
    """(place, key of the call) of a barrier array among a call's arguments; nothing if a type is unknown."""
    given = dict(zip((p.name for p in function.params), args)) | kwargs
    places = [place for name, value in given.items() for place in _find(value, array, name)]
    if not places:
        return []
    try:
        key = tuple(
            _mangle(given[p.name] if p.name in given else map_value(p.default), p.name in function.constexprs)
            for p in function.params
        )
    except Unknown:
        return []
    return [(place, key) for place in places]


def _find(value, array, place):
    if value is array or (isinstance(value, MBarrier) and value.array is array):
        yield place
    elif isinstance(value, Aggregate):
        for name, field in vars(value).items():
            yield from _find(field, array, f"{place}.{name}")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _find(item, array, f"{place}.{i}")


def _mangle(value, constant):
    """A key that is equal only where the compiler's mangled type (or compile-time value) is."""
    if isinstance(value, Tensor):
        return "tensor", str(value.dtype), value.shape
    if isinstance(value, BarrierArray):
        return "barriers", value.num
    if isinstance(value, MBarrier):
        return "barrier", value.cta is CTX.machine.cur.cta
    if isinstance(value, Descriptor):
        return "descriptor", str(value.dtype), tuple(value.block_shape)
    if isinstance(value, Buffer):
        return "buffer", str(value.dtype), value.shape, value.num, value.storage.kind
    if isinstance(value, Aggregate):
        return type(value), tuple((name, _mangle(field, True)) for name, field in vars(value).items())
    if isinstance(value, tuple):
        return type(value), tuple(_mangle(item, constant) for item in value)
    if isinstance(value, (int, float)) and not constant:
        raise Unknown
    if value is None or isinstance(value, (int, float, str)):
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError:
        raise Unknown from None
    return value  # functions, element types, classes: equal only to themselves
