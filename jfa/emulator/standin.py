"""A stand-in `triton` package for machines without a Triton wheel (macOS, Windows).

It makes `import triton`, `import triton.language as tl` and `import triton.language.extra.tlx as tlx` work,
with the emulated languages behind them; kernels import and run in the emulator. It is no compiler:
`triton.compile` raises, and a launch outside of `jfa.emulator.emulate` raises.
"""

import importlib.machinery
import importlib.util
import sys
import types

from . import standin_runtime as runtime

VERSION = "3.7.4+standin"
ORIGIN = "jfa.emulator.standin"
JIT = ("JITFunction", "JITCallable", "KernelInterface", "ConstexprFunction", "BoundConstexprFunction")
TOP = (
    "jit",
    "autotune",
    "heuristics",
    "Config",
    "aggregate",
    "constexpr_function",
    "cdiv",
    "next_power_of_2",
)
TOP += ("set_allocator", "compile", "CompilationError", "OutOfResources", "JITFunction", "KernelInterface")


def wanted():
    """True when no `triton` package is installed."""
    if sys.modules.get("triton", True) is None:
        return True
    try:
        spec = importlib.util.find_spec("triton")
    except ValueError:
        return False
    return spec is None or spec.origin == ORIGIN


def installed():
    """True when `triton` is the stand-in."""
    return getattr(getattr(sys.modules.get("triton"), "__spec__", None), "origin", None) == ORIGIN


def install():
    """Put the stand-in into sys.modules when no Triton is there; returns whether the stand-in is in use."""
    if installed():
        return True
    if not wanted():
        return False
    package()
    return True


def package():
    """Make the stand-in package, register all its modules, and return it."""
    _tell_torch()
    _modules()
    return sys.modules["triton"]


def uninstall():
    """Take the stand-in out of sys.modules; kernels that were imported with it keep working."""
    if installed():
        for name in [n for n in sys.modules if n == "triton" or n.startswith("triton.")]:
            del sys.modules[name]


def _tell_torch():
    """Let torch conclude now that there is no Triton, so that it never compiles with the stand-in."""
    if "torch" in sys.modules:
        from torch.utils import _triton

        _triton.has_triton_package()


def _take(names):
    return {name: getattr(runtime, name) for name in names}


def _module(name, module=None, **members):
    """Register a module (a new one if none is given) and hang it on its parent."""
    if module is None:
        module = types.ModuleType(name, __doc__)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=ORIGIN, is_package=True)
        module.__dict__.update(members)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def _modules():
    from . import standin_library as library
    from . import tl_ops, tlx_ops

    _module("triton", **_take(TOP), __version__=VERSION)
    _module(
        "triton.runtime",
        driver=types.SimpleNamespace(active=runtime.ActiveDriver()),
        **_take(("JITFunction",)),
    )
    _module("triton.runtime.jit", **_take(JIT + ("jit", "constexpr_function")))
    _module("triton.runtime.autotuner", **_take(("Autotuner", "Heuristics", "Config", "OutOfResources")))
    _module("triton.runtime.cache", triton_key=lambda: VERSION)
    _module("triton.runtime.errors", **_take(("OutOfResources",)))
    _module("triton.compiler", **_take(("CompiledKernel", "CompilationError", "compile")))
    _module("triton.compiler.compiler", triton_key=lambda: VERSION, **_take(("CompiledKernel",)))
    _module("triton.compiler.errors", **_take(("CompilationError",)))
    _module("triton.backends")
    _module("triton.backends.compiler", **_take(("GPUTarget",)))
    _module("triton.testing", **_take(("do_bench",)))
    _module("triton.tools")
    _module("triton.tools.tensor_descriptor", **_take(("TensorDescriptor",)))
    _module(
        "triton.knobs", cache=types.SimpleNamespace(dir=None), runtime=types.SimpleNamespace(interpret=False)
    )
    _languages(tl_ops, tlx_ops, library)


def _languages(tl_ops, tlx_ops, library):
    language = _public(tl_ops) | {"constexpr": runtime.constexpr}
    _module("triton.language", **language)
    _module("triton.language.core", **language)
    _module("triton.language.math", **vars(tl_ops.math))
    _module("triton.language.random", **vars(tl_ops.random))
    _module("triton.language.extra")
    for name in ("triton.language.extra.libdevice", "triton.language.extra.cuda"):
        _module(name)
    for name in ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice"):
        _module(name, _DeviceFunctions(name, tl_ops.libdevice))
    _module("triton.language.extra.cuda.inline_ptx_lib", **library.INLINE_PTX)
    _module("triton.language.extra.subtile_ops", **library.SUBTILE_OPS)
    _module("triton.language.extra.tlx", **_public(tlx_ops))
    _module("triton.language.extra.tlx.warp_spec", **library.WARP_SPEC)


def _public(namespace):
    return {name: value for name, value in vars(namespace).items() if not name.startswith("__")}


class _DeviceFunctions(types.ModuleType):
    """Module of libdevice functions, looked up by name."""

    def __init__(self, name, functions):
        super().__init__(name, __doc__)
        self._functions = functions
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=ORIGIN)

    def __getattr__(self, name):
        return getattr(self._functions, name)
