"""Names and keywords of the emulated tl and tlx against the installed Triton: drift fails here.

What is not emulated stands in a table with its reason; everything else must exist and take the same
parameters in the same order.
"""

import inspect
import types

import pytest

tl = pytest.importorskip("triton.language", reason="Triton is not installed")
tlx = pytest.importorskip("triton.language.extra.tlx", reason="the installed Triton has no TLX")

from jfa.emulator import tl_ops, tlx_ops  # noqa: E402
from jfa.emulator.descriptor import Descriptor  # noqa: E402
from jfa.emulator.kernels import Kernel  # noqa: E402
from jfa.emulator.tile import Tensor  # noqa: E402

NOT_EMULATED = {}


def _leave(reason, names):
    NOT_EMULATED.update(dict.fromkeys(names.split(), reason))


_leave("types of the compiler's front end; kernels do not name them", "constexpr_type tuple_type str_to_ty")
_leave(
    "types of the compiler's front end; kernels do not name them", "tensor_descriptor_type nv_tma_desc_type"
)
_leave("a result never depends on the order here", "CompositeReductionOrdering ReductionOrderingBase")
_leave("no type of a value", "void")
_leave("not a format of sm_90 or sm_100", "float8e4b15 float8e4b8 float8e5b16")
_leave("the compiler's own warp specialization marks; TLX kernels use tlx's", "tl.async_task tl.async_tasks")
_leave("imports of the module, not part of the language", "math.List math.T math.wraps")
_leave("AMD hardware", "amd_descriptor_prefetch_tensor async_amd_descriptor_load async_amd_descriptor_store")
_leave("AMD hardware", "async_amd_descriptor_wait buffer_load buffer_load_to_local buffer_store")
_leave(
    "layouts are not modelled", "DummyRegisterLayoutEncoding layout_encoding nv_mma_shared_layout_encoding"
)
_leave("layouts are not modelled", "padded_shared_layout_encoding shared_layout_encoding")
_leave(
    "layouts are not modelled", "swizzled_shared_layout_encoding tensor_memory_layout_encoding TMemCTAMode"
)
_leave("types of the compiler's front end; kernels do not name them", "async_token buffered_tensor_type")
_leave(
    "types of the compiler's front end; kernels do not name them",
    "clc_response clc_response_type mbarrier_type",
)
_leave(
    "types of the compiler's front end; kernels do not name them",
    "reuse_group_ir_type storage_alias_spec_type",
)
_leave("types of the compiler's front end; kernels do not name them", "storage_alias_spec_type_class")
_leave(
    "types of the compiler's front end; kernels do not name them",
    "tensor_descriptor_ptr tensor_descriptor_ptr_type",
)

# Values that a kernel gets but does not construct: their constructors differ, their use does not.
MADE_BY_THE_EMULATOR = {"dtype", "slice", "tuple", "tensor", "tensor_descriptor", "tensor_descriptor_base"}
MADE_BY_THE_EMULATOR |= {"buffered_tensor", "mbarrier", "CLCPipelineContext"}
# Signatures that the installed package writes as *args and **kwargs; what it reads of them is checked below.
OPEN_ENDED = {"tlx.async_task", "descriptor.gather", "descriptor.scatter"}
FRONT_END = {"_semantic", "_builder", "_generator"}


def parameters(function, method=False):
    """Parameter names, without those of the front end and (for a method) without the object itself."""
    function = getattr(function, "fn", function)
    if inspect.isclass(function):
        own = function.__init__ is not object.__init__
        function, method = function.__init__ if own else function.__new__, True
    names = [p.name for p in inspect.signature(function).parameters.values() if p.name not in FRONT_END]
    return names[1:] if method else names


def public(namespace):
    """Names a kernel could use: everything public that is no module."""
    names = [n for n in dir(namespace) if not n.startswith("_")]
    return [n for n in names if not isinstance(getattr(namespace, n), types.ModuleType)]


def reason(tag, name):
    return NOT_EMULATED.get(f"{tag}.{name}") or NOT_EMULATED.get(name)


SPACES = {"tl": (tl, tl_ops), "math": (tl.math, tl_ops.math), "tlx": (tlx, tlx_ops)}
MEMBERS = {"tensor": (tl.tensor, Tensor), "descriptor": (tl.tensor_descriptor, Descriptor)}
NAMES = [(tag, name) for tag, (real, _) in SPACES.items() for name in public(real)]
METHODS = [(tag, name) for tag, (real, _) in MEMBERS.items() for name in public(real)]


def is_source(value):
    return type(value).__name__ == "JITFunction"


def test_something_is_compared():
    assert len(NAMES) > 250 and len(METHODS) > 60


@pytest.mark.parametrize("tag, name", NAMES, ids=[f"{t}.{n}" for t, n in NAMES])
def test_name(tag, name):
    real, emulated = SPACES[tag]
    wanted = getattr(real, name)
    if name not in vars(emulated):
        if tag == "tlx" and is_source(wanted):
            assert isinstance(getattr(emulated, name), Kernel)  # runs from its own source
            return
        assert reason(tag, name), f"{tag}.{name} is neither emulated nor listed with a reason"
        return
    assert not reason(tag, name), f"{tag}.{name} is emulated and listed as not emulated"
    if name in MADE_BY_THE_EMULATOR or f"{tag}.{name}" in OPEN_ENDED or not callable(wanted):
        return
    try:
        expected = parameters(wanted)
    except (TypeError, ValueError):  # an enum of the compiler
        expected = None
    if expected is not None:
        assert parameters(vars(emulated)[name]) == expected, f"{tag}.{name}: parameters differ"


@pytest.mark.parametrize("tag, name", METHODS, ids=[f"{t}.{n}" for t, n in METHODS])
def test_method(tag, name):
    real, emulated = MEMBERS[tag]
    wanted = getattr(real, name)
    if not callable(wanted):
        return  # an attribute: descriptors set theirs when they are made
    assert hasattr(emulated, name), f"{tag}.{name} is missing"
    if f"{tag}.{name}" not in OPEN_ENDED:
        assert parameters(getattr(emulated, name), True) == parameters(wanted, True), (
            f"{tag}.{name}: parameters differ"
        )


def test_every_exception_in_the_table_still_exists():
    for entry in NOT_EMULATED:
        tag, _, name = entry.rpartition(".")
        spaces = [SPACES[tag]] if tag else SPACES.values()
        assert any(hasattr(real, name) for real, _ in spaces), f"{entry} is no longer part of Triton"


def test_a_task_takes_every_option_that_tlx_reads():
    import re

    source = inspect.getsource(tlx.async_task)
    read = set(re.findall(r"kwargs\.get\(\s*\"(\w+)\"", source))
    assert {"num_warps", "replicate"} <= read
    assert read <= set(parameters(tlx_ops.async_task))


def test_rows_are_gathered_and_scattered_as_the_front_end_does():
    from triton.language.semantic import TritonSemantic

    assert parameters(TritonSemantic.descriptor_gather)[2:4] == parameters(Descriptor.gather, True)
    assert parameters(TritonSemantic.descriptor_scatter)[2:] == parameters(Descriptor.scatter, True)


def comparable(default):
    """A default value without the wrappers that Triton or the emulator put around it."""
    default = getattr(default, "value", default) if type(default).__name__ == "constexpr" else default
    if hasattr(default, "name"):  # an element type or a member of an enum
        return default.name
    return list(default) if isinstance(default, (list, tuple)) else default


def test_defaults_are_those_of_triton():
    differing = []
    for tag, name in NAMES:
        real, emulated = SPACES[tag]
        if name not in vars(emulated) or name in MADE_BY_THE_EMULATOR or not callable(getattr(real, name)):
            continue
        functions = [getattr(f, "fn", f) for f in (getattr(real, name), vars(emulated)[name])]
        if not all(inspect.isfunction(f) for f in functions):
            continue
        wanted, got = (inspect.signature(f).parameters for f in functions)
        for key, parameter in wanted.items():
            if key in FRONT_END or parameter.default is inspect.Parameter.empty or key not in got:
                continue
            default, mine = comparable(parameter.default), comparable(got[key].default)
            if default != mine:
                differing.append(f"{tag}.{name}({key}): {default} in Triton, {mine} here")
    assert differing == []
