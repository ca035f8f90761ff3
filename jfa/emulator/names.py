"""What a name in kernel source means in the emulator: modules, jit functions, element types, aggregates."""

import functools
import importlib
import inspect
import types

from . import dtypes as D
from . import tl_ops as lang
from .barriers import BarrierArray
from .context import CTX
from .errors import UnknownConstruct
from .kernels import Kernel, kernel
from .tile import Tensor

JIT_TYPES = {
    "JITFunction",
    "JITCallable",
    "InterpretedFunction",
    "ConstexprFunction",
    "Autotuner",
    "Heuristics",
}

triton_facade = types.SimpleNamespace(
    cdiv=lambda a, b: -(-a // b),
    next_power_of_2=lambda n: 1 << (int(n) - 1).bit_length() if int(n) > 0 else 1,
    language=lang,
)


libdevice = lang.libdevice


class ModuleProxy:
    """A module of Triton other than tl and tlx: its attributes are mapped one by one."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        return map_value(getattr(self._module, name))


def map_module(module):
    from . import tlx_ops

    name = module.__name__
    if module is lang or module is tlx_ops:
        return module
    if name == "triton":
        return triton_facade
    if name in ("triton.language", "triton.language.core"):
        return lang
    if name == "triton.language.math":
        return lang.math
    if name.endswith("extra.tlx"):
        return tlx_ops
    if "libdevice" in name:
        return libdevice
    if name.startswith("triton") or ".tlx" in name:
        return ModuleProxy(module)
    return module


def map_value(v):
    """The emulated form of a global (or a compile-time argument) of a kernel."""
    if isinstance(v, types.ModuleType):
        return map_module(v)
    if isinstance(v, type) and getattr(v, "__triton_aggregate__", False):
        return aggregate(v)
    kind = type(v).__name__
    if kind in JIT_TYPES:
        return kernel(v)
    if kind == "constexpr":
        return map_value(v.value)
    if kind == "dtype" and type(v).__module__.startswith("triton"):
        return D.by_name(v.name)
    if callable(v) and (getattr(v, "__module__", None) or "").startswith(("triton.", "torch._inductor")):
        return map_triton_callable(v)
    if isinstance(v, tuple):
        mapped = [map_value(x) for x in v]
        return type(v)(*mapped) if hasattr(v, "_fields") else tuple(mapped)
    return v


def map_triton_callable(v):
    """A function or type of Triton that was imported by name."""
    from . import tlx_ops

    name = getattr(v, "__name__", None)
    for namespace in (lang, tlx_ops):
        if name in namespace.__dict__:
            return namespace.__dict__[name]
    if "libdevice" in v.__module__:
        return getattr(libdevice, name)
    wrapped = getattr(v, "__wrapped__", None)
    if wrapped is not None and inspect.isfunction(wrapped):
        return kernel(wrapped)  # a builtin that is written in Python
    return v


def real_tlx(name):
    """A name of the installed tlx that is not emulated: jit source runs as it is, the rest is unknown."""
    try:
        value = getattr(importlib.import_module("triton.language.extra.tlx"), name)
    except (ImportError, AttributeError):
        raise UnknownConstruct(f"tlx.{name}") from None
    mapped = map_value(value)
    from_source = isinstance(mapped, Kernel) and type(value).__name__ in JIT_TYPES
    if from_source or isinstance(mapped, (int, str, D.DType)) or isinstance(value, types.ModuleType):
        return mapped
    raise UnknownConstruct(f"tlx.{name}")


# ---- built-in functions that kernels call on registers
def builtin_min(*args):
    if any(isinstance(a, Tensor) for a in args):
        return functools.reduce(lang.minimum, args)
    return min(*args)


def builtin_max(*args):
    if any(isinstance(a, Tensor) for a in args):
        return functools.reduce(lang.maximum, args)
    return max(*args)


# ---- aggregates
_AGGREGATES = {}


class Aggregate:
    """Base of emulated triton.aggregate classes: methods run from source, fields are plain attributes."""

    fields = ()
    methods = {}


def aggregate(cls):
    """The emulated twin of a triton.aggregate class."""
    twin = _AGGREGATES.get(cls)
    if twin is None:
        twin = _AGGREGATES[cls] = type(cls.__name__, (Aggregate,), {})
        twin.fields = tuple(cls.__dict__.get("__annotations__", {}))
        twin.methods = {}
        init = getattr(cls, "hash_attrs", [None])[0]
        own_init = init is not None and not getattr(init, "__triton_builtin__", False)
        twin.__init__ = _init_method(kernel(init)) if own_init else _init_fields
        for name in dir(cls):
            member = inspect.getattr_static(cls, name)
            if _is_method(name, member):
                twin.methods[name] = kernel(member)
                setattr(twin, name, _method(twin.methods[name]))
    return twin


def _is_method(name, member):
    if name.startswith("__") and name not in ("__getitem__", "__call__", "__len__"):
        return False
    if hasattr(member, "fn"):
        return True
    return inspect.isfunction(member) and name not in (
        "_set_name",
        "_flatten_ir",
        "_get_instance",
        "_flatten_ir_types",
    )


def _method(function):
    def method(self, /, *args, **kwargs):
        return function(self, *args, **kwargs)

    return method


def _init_method(function):
    def __init__(self, /, *args, **kwargs):
        function(self, *args, **kwargs)

    return __init__


def _init_fields(self, /, *args, **kwargs):
    values = dict(zip(self.fields, args)) | kwargs
    if set(values) != set(self.fields) or len(args) > len(self.fields):
        raise TypeError(f"{type(self).__name__}() takes {', '.join(self.fields)}")
    for name, value in values.items():
        setattr(self, name, value)


def allocation_count():
    """(allocations, barrier arrays) of the running CTA, before a call whose result is labelled."""
    machine = CTX.machine
    if machine is None or machine.cur is None:
        return 0, 0
    cta = machine.cur.cta
    return len(cta.allocations), len(cta.barrier_arrays)


def label_aggregate(name, before, value):
    """Allocations that a call made (since `before`) and returns take the name of what it is assigned to.

    In an aggregate (or a tuple) they take the names of its fields: what a helper calls `fulls` is `q.fulls`
    for the caller, so that rings made by one helper differ. Others keep their name, unless it is made up.
    """
    if isinstance(value, Aggregate):
        for field in value.fields:
            label_aggregate(f"{name}.{field}", before, getattr(value, field, None))
    elif type(value) is tuple:
        for i, v in enumerate(value):
            label_aggregate(f"{name}.{i}", before, v)
    else:
        owner = getattr(value, "alloc", value)
        named = getattr(owner, "named", None)
        if named is False or (named and owner.index >= before[isinstance(owner, BarrierArray)]):
            owner.name = name
            owner.named = True
    return value
