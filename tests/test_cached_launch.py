"""Launches that skip Triton's search for the binary: never one that Triton would tell apart."""

import gc
import itertools

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa import emulator
from jfa.kernels import cached_launch
from jfa.kernels.cached_launch import key_of, launch
from jfa.kernels.ragged import ragged_descriptor
from jfa.lab.launches import Launch, capture_launches, specialize


@triton.jit
def double(x):
    return x + x


@triton.jit
def triple(x):
    return x + x + x


@triton.jit
def scale_rows(x, y, n, factor, CHANGE: tl.constexpr, BLOCK: tl.constexpr, EXTRA: tl.constexpr = 0):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = CHANGE(tl.load(x + at, mask=at < n)) * factor + EXTRA
    tl.store(y + at, value, mask=at < n)


@triton.jit
def copy_rows(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


class Binary:
    """What Triton gives back for a launch; remembers what it was run with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.runs = []

    def run(self, *given):
        self.runs.append(given)


class Driver:
    """Device and stream of a machine with GPUs."""

    device, stream = 0, 7

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return self.stream


@pytest.fixture
def compiled(monkeypatch):
    """The launches that go through Triton, as (binary, grid, arguments, constants); none is kept before."""
    made = []

    def getitem(self, grid):
        def start(*arguments, **constants):
            made.append((Binary(), grid, arguments, constants))
            return made[-1][0]

        return start

    monkeypatch.setattr(cached_launch, "_KEPT", {})
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "__getitem__", getitem)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return made


def rows(count=64, dtype=torch.float32, shift=0):
    return torch.zeros(count + shift, dtype=dtype)[shift:]


def double_rows():
    """A launch that always has the same key."""
    x = rows()
    launch(scale_rows, (1,), x, x, 64, 2.0, CHANGE=double, BLOCK=64)


def test_the_second_launch_runs_the_first_one_s_binary(compiled):
    x, y, z = rows(), rows(), rows()
    constants = {"CHANGE": double, "BLOCK": 64, "num_warps": 4}
    launch(scale_rows, (3,), x, y, 64, 2.0, **constants)
    ((binary, grid, arguments, named),) = compiled
    assert (grid, named, binary.runs) == ((3,), constants, [])
    assert arguments[:2] == (x, y)
    launch(scale_rows, (5, 2), z, x, 48, 0.5, **constants)
    assert len(compiled) == 1
    (given,) = binary.runs
    assert given[:6] == (5, 2, 1, 7, "function", "metadata")
    assert given[6:9] == (None, None, None)  # no hooks
    assert given[9] is z and given[10] is x
    assert given[11:] == (48, 0.5, double, 64, 0)  # options are no arguments, and a default is one


def test_another_device_another_role_another_option_is_another_launch(compiled, monkeypatch):
    x = rows()
    for change, block, warps in itertools.product((double, triple), (32, 64), (4, 8)):
        launch(scale_rows, (1,), x, x, 64, 2.0, CHANGE=change, BLOCK=block, num_warps=warps)
    assert len(compiled) == 8
    monkeypatch.setattr(Driver, "device", 1)
    launch(scale_rows, (1,), x, x, 64, 2.0, CHANGE=double, BLOCK=32, num_warps=4)
    assert len(compiled) == 9
    launch(scale_rows, (1,), x, x, 64, 2.0, CHANGE=double, BLOCK=32, num_warps=4)
    assert len(compiled) == 9


def test_a_kernel_that_is_gone_leaves_its_identity_to_nobody(compiled):
    """CPython gives a new object the address of one that was freed; a kept launch must not let it."""
    x = rows()
    for _ in range(20):

        @triton.jit
        def same(x, CHANGE: tl.constexpr):
            return x

        launch(same, (1,), x, CHANGE=double)
        compiled[-1] = None
        del same
        gc.collect()
    assert len(compiled) == 20


def test_an_error_of_the_first_launch_is_not_kept(compiled, monkeypatch):
    kind = triton.runtime.jit.JITFunction
    working = kind.__getitem__

    def failing(self, grid):
        raise RuntimeError("does not compile")

    monkeypatch.setattr(kind, "__getitem__", failing)
    with pytest.raises(RuntimeError, match="does not compile"):
        double_rows()
    monkeypatch.setattr(kind, "__getitem__", working)
    double_rows()
    assert len(compiled) == 1


def test_hooks_see_every_launch(compiled, monkeypatch):
    double_rows()
    for chain in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        chain.add(print)
        double_rows()
        chain.remove(print)
    monkeypatch.setattr(scale_rows, "pre_run_hooks", [print])
    double_rows()
    assert len(compiled) == 4


def test_a_hook_into_stages_and_a_run_of_one_kernel_see_every_launch(compiled, monkeypatch):
    double_rows()
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", ""))
        double_rows()
    with monkeypatch.context() as patch:
        patch.setattr(scale_rows, "run", lambda *_, **__: None)
        double_rows()
    assert len(compiled) == 3


def test_a_launch_without_a_binary_is_not_kept(compiled, monkeypatch):
    """Triton gives None where a hook (jit_cache_hook) took over the compilation."""
    kind = triton.runtime.jit.JITFunction
    with monkeypatch.context() as patch:
        patch.setattr(kind, "__getitem__", lambda self, grid: lambda *_, **__: None)
        double_rows()
    for _ in range(2):
        double_rows()
    assert [len(binary.runs) for binary, *_ in compiled] == [1]


class Width(int):
    """An int that is not quite one."""


@pytest.mark.parametrize("value", [tl.constexpr(64), double, (1, 2), Width(64), "64"])
def test_an_argument_of_another_kind_goes_through_triton(compiled, value):
    for _ in range(2):
        launch(scale_rows, (1,), rows(), rows(), value, 2.0, CHANGE=double, BLOCK=64)
    assert len(compiled) == 2


def test_torch_compile_sees_the_kernel(monkeypatch):
    """It puts a launch into its graph, if it can follow the code down to it."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda *_: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    graphs = []

    def backend(module, examples):
        graphs.append(module.code)
        return lambda *given: [given[0] + 1]

    @torch.compile(fullgraph=True, backend=backend)
    def step(x):
        launch(copy_rows, (1,), x, x, 64, BLOCK=64)  # functions as constants are more than it knows
        return x + 1

    step(rows())
    assert len(graphs) == 1 and "triton_kernel" in graphs[0]


def test_who_replaces_run_sees_every_launch():
    with capture_launches() as seen:
        for _ in range(3):
            double_rows()
    assert [one.name for one in seen] == ["scale_rows"] * 3


def test_the_emulator_runs_every_launch():
    x, y = torch.ones(64), torch.zeros(64)
    with emulator.emulate() as machine:
        for factor in (2.0, 3.0):
            launch(scale_rows, (1,), x, y, 64, factor, CHANGE=double, BLOCK=64)
            assert y.tolist() == [2 * factor] * 64
    assert len(machine.reports) == 2


# ---------------------------------------------------------------- as fine as Triton's own distinctions

NUMBERS = (
    0,
    1,
    2,
    15,
    16,
    17,
    31,
    2**31 - 16,
    2**31 - 1,
    2**31,
    2**31 + 1,
    2**40,
    2**63 - 1,
    2**63,
    2**63 + 1,
)
NUMBERS += tuple(-x for x in NUMBERS[1:-2]) + (True, False, 0.0, 1.0, 2.5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
BOXES = ((16, 16), (16, 32), (32, 16))


def pointers():
    return [rows(64, dtype, shift) for dtype in DTYPES for shift in (0, 1, 4, 8)] + [
        torch.nn.Parameter(rows())
    ]


def descriptors():
    tables = [torch.zeros(64, 64, dtype=dtype) for dtype in DTYPES[:3]] + [torch.zeros(32, 128)]
    plain = [TensorDescriptor.from_tensor(table, list(box)) for table in tables for box in BOXES]
    return plain + [ragged_descriptor(table, *box) for table in tables for box in BOXES]


def of_triton(backend, kernel, arguments, constants):
    """Everything by which Triton finds a binary, as text."""
    options, signature, values, attributes = specialize(
        Launch(kernel, (1, 1, 1), arguments, constants), backend
    )
    return repr((options, signature, {key: str(value) for key, value in values.items()}, attributes))


@pytest.mark.parametrize("place", range(4))
def test_what_triton_tells_apart_has_another_key(place):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    usual = [rows(), rows(), 64, 2.0]
    tried = [*NUMBERS, *pointers(), *descriptors()]
    meant = {}
    for value in tried:
        arguments = (*usual[:place], value, *usual[place + 1 :])
        constants = {"CHANGE": double, "BLOCK": 64, "num_warps": 4}
        key = key_of(scale_rows, 0, arguments, constants)
        meant.setdefault(key, set()).add(of_triton(backend, scale_rows, arguments, constants))
    assert all(len(texts) == 1 for texts in meant.values())
    everything = set().union(*meant.values())
    assert len(everything) > 20
    assert len(meant) <= 2 * len(everything)  # and it is not much finer, or nothing would ever be found


def test_constants_and_options_have_their_own_keys():
    """Triton's distinctions for constants: the value, for functions which one it is."""
    values = {"CHANGE": (double, triple), "BLOCK": (32, 64), "EXTRA": (0, 1, None), "num_warps": (4, 8)}
    keys = {
        key_of(scale_rows, 0, (), dict(zip(values, chosen, strict=True)))
        for chosen in itertools.product(*values.values())
    }
    assert len(keys) == 2 * 2 * 3 * 2
    equal = [
        key_of(scale_rows, 0, (), {"ctas_per_cga": (pair, 1, 1), "BLOCK": int("512")}) for pair in (2, 2)
    ]
    assert equal[0] == equal[1]
