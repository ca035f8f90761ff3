"""Host side of the stand-in `triton`: decorators, autotuner, configurations, tensor descriptors.

The classes carry the names and attributes of Triton's own, so that the front end treats both alike. A launch
works inside `jfa.emulator.emulate` only, which replaces the `run` methods.
"""

import inspect
import operator
import time
import types

HINT = "no Triton is installed here: launch kernels inside `with jfa.emulator.emulate():`"


class KernelInterface:
    """Something that `kernel[grid](...)` launches."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args, grid, warmup=False, **kwargs):
        raise RuntimeError(HINT)


class JITCallable:
    """A function whose source the emulator compiles."""

    def __init__(self, fn):
        self.fn = fn
        self.__name__ = fn.__name__
        self.__qualname__ = fn.__qualname__
        self.__module__ = fn.__module__
        self.__doc__ = fn.__doc__
        self.__globals__ = fn.__globals__
        self.signature = inspect.signature(fn)
        self.arg_names = list(self.signature.parameters)

    @property
    def src(self):
        return inspect.getsource(self.fn)


class JITFunction(JITCallable, KernelInterface):
    """What @triton.jit makes."""

    def __init__(self, fn, **options):
        super().__init__(fn)
        self.options = options
        self.params = list(self.signature.parameters.values())

    def __call__(self, *args, **kwargs):
        raise RuntimeError(
            f"{self.__name__} is a @triton.jit function: call it from a kernel, launch it with [grid]"
        )


class BoundConstexprFunction:
    """A constexpr method together with its object."""

    def __init__(self, instance, function):
        self.instance = instance
        self.fn = function.fn

    def __call__(self, *args, **kwargs):
        return self.fn(self.instance, *args, **kwargs)


class ConstexprFunction(JITCallable):
    """What @triton.constexpr_function makes: a Python function of compile-time values."""

    def __get__(self, instance, owner=None):
        return self if instance is None else BoundConstexprFunction(instance, self)

    def __call__(self, *args, _semantic=None, **kwargs):
        return self.fn(*args, **kwargs)


class Config:
    """One choice of an autotuner; options beyond the named ones become attributes."""

    def __init__(self, kwargs, num_warps=4, num_stages=3, num_ctas=1, maxnreg=None, pre_hook=None, **options):
        self.kwargs = kwargs
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.num_ctas = num_ctas
        self.maxnreg = maxnreg
        self.pre_hook = pre_hook
        self.ctas_per_cga = options.pop("ctas_per_cga", None)
        self.__dict__.update(options)

    def all_kwargs(self):
        launch = {"num_warps": self.num_warps, "num_stages": self.num_stages, "num_ctas": self.num_ctas}
        return {**self.kwargs, **launch}

    def __repr__(self):
        return f"Config({self.kwargs}, num_warps={self.num_warps}, num_stages={self.num_stages})"


class Autotuner(KernelInterface):
    """A kernel with configurations; the emulator takes the first that pruning leaves."""

    def __init__(self, fn, configs, key, prune_configs_by=None, **options):
        self.fn = fn
        self.configs = configs or [Config({})]
        self.keys = key
        self.best_config = None
        self.cache = {}
        prune = prune_configs_by or {}
        self.early_config_prune = prune.get("early_config_prune")
        self.perf_model = prune.get("perf_model")
        self.configs_top_k = prune.get("top_k", 1.0)
        self.options = options
        base = fn
        while not inspect.isfunction(base):
            base = base.fn
        self.base_fn = base
        self.__name__ = base.__name__
        self.__doc__ = base.__doc__
        self.arg_names = list(inspect.signature(base).parameters)


class Heuristics(KernelInterface):
    """A kernel with arguments computed from its other arguments."""

    def __init__(self, fn, arg_names, values):
        self.fn = fn
        self.arg_names = arg_names
        self.values = values
        self.__name__ = fn.__name__


def jit(fn=None, **options):
    return JITFunction(fn, **options) if fn is not None else (lambda f: JITFunction(f, **options))


def constexpr_function(fn):
    return ConstexprFunction(fn)


def autotune(configs, key, prune_configs_by=None, **options):
    return lambda fn: Autotuner(fn, configs, key, prune_configs_by, **options)


def heuristics(values):
    return lambda fn: Heuristics(fn, fn.arg_names, values)


def aggregate(cls):
    """Mark a class as a value of several fields with methods; the emulator builds its own twin of it."""
    init = cls.__dict__.get("__init__")
    if init is None:

        def init(self, *args, **kwargs):
            fields = cls.__dict__.get("__annotations__", {})
            for name, value in [*zip(fields, args), *kwargs.items()]:
                setattr(self, name, value)

        init.__triton_builtin__ = True
        cls.__init__ = init
    cls.__triton_aggregate__ = True
    cls.hash_attrs = [init]
    return cls


class TensorDescriptor:
    """A host tensor seen through a block shape; bases may be torch tensors or numpy arrays."""

    def __init__(self, base, shape, strides, block_shape, padding="zero", round_f32_to_tf32=False):
        self.base = base
        self.shape = list(shape)
        self.strides = list(strides)
        self.block_shape = list(block_shape)
        self.padding = padding
        self.round_f32_to_tf32 = round_f32_to_tf32
        self._check()

    def _check(self):
        rank = len(self.shape)
        assert 0 < rank <= 5, "a descriptor has 1 to 5 dimensions"
        assert len(self.strides) == rank and len(self.block_shape) == rank, f"rank mismatch: {self.__dict__}"
        size = self.base.dtype.itemsize
        address = self.base.data_ptr() if hasattr(self.base, "data_ptr") else self.base.ctypes.data
        assert address % 16 == 0, "base must be 16-byte aligned"
        assert all(stride * size % 16 == 0 for stride in self.strides[:-1]), "strides must be 16-byte aligned"
        assert all(n > 0 for n in self.shape), "shape must be positive"
        assert self.strides[-1] == 1, "the last dimension must be contiguous"
        assert self.padding in ("zero", "nan"), "illegal value for padding"

    @staticmethod
    def from_tensor(tensor, block_shape, padding="zero", round_f32_to_tf32=False):
        if hasattr(tensor, "stride"):
            strides = tensor.stride()
        else:
            strides = [n // tensor.itemsize for n in tensor.strides]
        return TensorDescriptor(tensor, tensor.shape, strides, block_shape, padding, round_f32_to_tf32)


class constexpr:
    """tl.constexpr on the host: a value in a wrapper, as Triton has it; in a kernel it is the bare value."""

    def __init__(self, value=None):
        self.value = value.value if isinstance(value, constexpr) else value

    def __repr__(self):
        return f"constexpr[{self.value}]"

    def __hash__(self):
        return hash(self.value)

    def __bool__(self):
        return bool(self.value)

    def __int__(self):
        return int(self.value)

    def __index__(self):
        return operator.index(self.value)

    def __float__(self):
        return float(self.value)

    def __len__(self):
        return len(self.value)

    def __iter__(self):
        return iter(self.value)

    def __getitem__(self, index):
        return self.value[index]

    def __call__(self, *args, **kwargs):
        return self.value(*args, **kwargs)


def _operate(fn, swapped=False):
    def method(self, other):
        other = other.value if isinstance(other, constexpr) else other
        return constexpr(fn(other, self.value) if swapped else fn(self.value, other))

    return method


for _name in "add sub mul truediv floordiv mod pow lshift rshift".split():
    setattr(constexpr, f"__{_name}__", _operate(getattr(operator, _name)))
    setattr(constexpr, f"__r{_name}__", _operate(getattr(operator, _name), swapped=True))
for _name in "lt le gt ge eq ne".split():
    setattr(constexpr, f"__{_name}__", _operate(getattr(operator, _name)))
for _name in "and or xor".split():
    setattr(constexpr, f"__{_name}__", _operate(getattr(operator, f"{_name}_" if _name != "xor" else _name)))
constexpr.__neg__ = lambda self: constexpr(-self.value)
constexpr.__invert__ = lambda self: constexpr(~self.value)


class OutOfResources(Exception):
    """A kernel that does not fit the GPU."""


class CompilationError(Exception):
    """A kernel that does not compile."""


class CompiledKernel:
    """Machine code of a kernel; there is none here."""


class ActiveDriver:
    """triton.runtime.driver.active: the CPU, with Blackwell as the target."""

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 100, 32)

    def get_current_stream(self, device=None):
        return 0


class GPUTarget(types.SimpleNamespace):
    """Backend name, compute capability times ten, threads of a warp."""

    def __init__(self, backend, arch, warp_size):
        super().__init__(backend=backend, arch=arch, warp_size=warp_size)


def compile(*args, **kwargs):
    raise RuntimeError("no Triton is installed here: kernels run in the emulator but cannot be compiled")


def do_bench(fn, warmup=25, rep=100, quantiles=None, **options):
    """Milliseconds of one call by the wall clock: time in the emulator, not on a GPU."""
    fn()
    start = time.perf_counter()
    fn()
    elapsed = (time.perf_counter() - start) * 1e3
    return [elapsed] * len(quantiles) if quantiles else elapsed


def cdiv(x, y):
    return (x + y - 1) // y


def next_power_of_2(n):
    return 1 << max(int(n) - 1, 0).bit_length()


def set_allocator(allocator):
    """Device descriptors need no memory here."""
