"""Jit functions compiled for emulation, and the cache of them."""

import ast
import builtins
import contextlib
import inspect
import re
import textwrap
import threading

from .carried import lost_carries
from .context import CTX
from .rewrite import callee, rewrite

_FILES = set()
_CACHE = {}
_LOCK = threading.RLock()
SIGNALS = ("barrier_arrive", "async_dot", "async_dot_scaled", "tcgen05_commit", "barrier_expect_bytes")


def user_line(frame):
    """Line of the innermost kernel source frame on the Python stack, or None."""
    while frame is not None:
        if frame.f_code.co_filename in _FILES:
            return frame.f_lineno
        frame = frame.f_back
    return None


def is_kernel_code(code):
    """Whether a code object is one of kernel source."""
    return code.co_filename in _FILES


def traceback_line(error):
    """Line of the innermost kernel source frame in an exception's traceback, or None."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in _FILES:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def base_function(k):
    """The Python function inside a JITFunction, Autotuner, Heuristics or another wrapper."""
    while not inspect.isfunction(k):
        k = k.fn if hasattr(k, "fn") else k.__wrapped__
    return k


def source_lines(k):
    """(lines, first line) of a jit function: those that it was made from, whatever its file holds by now."""
    while not inspect.isfunction(k):
        if hasattr(k, "raw_src"):
            return list(k.raw_src), k.starting_line_number
        k = k.fn if hasattr(k, "fn") else k.__wrapped__
    return inspect.getsourcelines(k)


def kernel(k):
    """The emulated form of a jit function (compiled at its first call)."""
    function = base_function(k)
    with _LOCK:
        found = _CACHE.get(function)
        if found is None:
            found = _CACHE[function] = Kernel(function, *source_lines(k))
        return found


def known():
    """Every jit function that has an emulated form so far."""
    with _LOCK:
        return list(_CACHE.values())


def _set_name(name):
    CTX.machine.next_name = name


def _value(v):
    return v.value if hasattr(v, "value") else v


class Kernel:
    """A jit function in emulated form; calling it runs it inline (a device call)."""

    def __init__(self, function, lines, first_line):
        self.function = function
        self.__name__ = function.__name__
        self.params = list(inspect.signature(function).parameters.values())
        self.constexprs = {p.name for p in self.params if "constexpr" in str(p.annotation)}
        self.lines = lines
        self.first_line = first_line
        self.source = textwrap.dedent("".join(lines))
        self.shares = bool(re.search(r"\btwo_ctas\s*=\s*(?!False)", self.source))  # MMAs or what they read
        self.code = None
        self.tree = None
        self.scope = {}
        self.bindings = {}
        self.lost = []

    def compile(self, patch=None):
        """Compiles the source; `patch` (source -> source) mutates it first, for tests of the detection."""
        source = patch(self.source) if patch else self.source
        with _LOCK:
            tree = rewrite(source, self.first_line)
            filename = self.function.__code__.co_filename
            _FILES.add(filename)
            self.scope = _builtins()
            self.bindings = {}
            self.tree = tree
            self.lost = lost_carries(source, self.first_line)
            self.bind()
            local = {}
            exec(compile(tree, filename, "exec"), self.scope, local)
            self.code = local[self.function.__name__]

    def globals(self):
        """Globals and closure of the original function as they are now."""
        function = self.function
        if not function.__closure__:
            return function.__globals__
        scope = dict(function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__):
            with contextlib.suppress(ValueError):  # an empty cell
                scope[name] = cell.cell_contents
        return scope

    def bind(self):
        """Maps the globals that the source uses to their emulated forms; again when one was redefined."""
        from .names import map_value

        now = self.globals()
        used = (
            {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name)}
            if not self.bindings
            else self.bindings
        )
        for name in list(used):
            if name in now and (name in self.bindings or name not in self.scope):
                value = now[name]
                if name not in self.bindings or self.bindings[name] is not value:
                    self.bindings[name] = value
                    self.scope[name] = map_value(value)

    def __call__(self, /, *args, **kwargs):
        if self.code is None:
            self.compile()
        for lost in self.lost:
            CTX.machine.violation("carried value lost", f"{self.__name__}: {lost}")
        return self.code(*args, **kwargs)

    def __repr__(self):
        return f"<emulated {self.__name__}>"


def _builtins():
    from . import names, tl_control, tl_ops

    return {
        "__builtins__": builtins,
        "__setname": _set_name,
        "__label": names.label_aggregate,
        "__before": names.allocation_count,
        "__value": _value,
        "__turns": tl_control.while_turns,
        "__types": tl_control.carried_types,
        "range": tl_ops.range,
        "min": names.builtin_min,
        "max": names.builtin_max,
        "print": tl_ops.device_print,
    }


def reachable(root, arguments=()):
    """The compiled functions that a kernel can call, through globals and function arguments."""
    from .names import Aggregate

    found = {}
    todo = [root, *arguments]
    while todo:
        v = todo.pop()
        if isinstance(v, Kernel) and v not in found:
            found[v] = True
            todo.extend(v.scope[name] for name in v.bindings)
        elif isinstance(v, type) and issubclass(v, Aggregate):
            todo.extend(v.methods.values())
        elif isinstance(v, (tuple, list)):
            todo.extend(v)
    return list(found)


def signal_sites(functions, name):
    """[(line, operation)] of what arrives on barriers of this name (of a.b.c the last part)."""
    last = name.rpartition(".")[2]
    sites = set()
    for function in functions:
        if function.tree is None:
            continue
        for node in ast.walk(function.tree):
            if isinstance(node, ast.Call) and callee(node) in SIGNALS and _mentions(node, last):
                sites.add((node.lineno, callee(node)))
    return sorted(sites)


def _mentions(node, name):
    for x in ast.walk(node):
        if isinstance(x, ast.Name) and x.id == name:
            return True
        if isinstance(x, ast.Attribute) and x.attr == name:
            return True
    return False


@contextlib.contextmanager
def mutated(function, patch):
    """While active, `function` (a jit function) runs as patch(source): the hook of mutation tests."""
    k = kernel(function)
    k.compile(patch)
    try:
        yield k
    finally:
        k.compile()
