"""What can run here, and why the rest cannot.

``reference`` is plain PyTorch. ``triton`` (compiler-scheduled), ``hopper`` (TLX, sm_90) and ``blackwell``
(TLX, sm_100) are kernels: on CUDA tensors they run on the GPU, on CPU tensors the very same kernels run
in the emulator. ``auto`` is the reference on a CPU, and on a GPU the fastest kernel that can run the
call.
"""

import contextlib
import functools
import importlib
import importlib.util

import torch

from jfa import reference
from jfa.kernels.problem import Problem

NAMES = ("auto", "reference", "triton", "hopper", "blackwell")
MODULES = {
    "triton": "jfa.kernels.baseline",
    "hopper": "jfa.kernels.hopper.launch",
    "blackwell": "jfa.kernels.blackwell.launch",
}
ARCHITECTURES = {"hopper": "sm_90", "blackwell": "sm_100"}
STANDIN = (
    "jfa.emulator.standin"  # the origin of the module triton where only the emulator's stand-in is there
)
CAPABILITIES = {"hopper": (9, 0), "blackwell": (10, 0)}


class Reference:
    """The definition behind the interface that every backend has: ``supports``, ``forward``, ``backward``."""

    @staticmethod
    def supports(problem: Problem) -> str | None:
        return None

    @staticmethod
    def forward(problem, q, k, v, kv_offsets, q_offsets, *, schedule=None, step=None):
        return reference.attention(q, k, v, kv_offsets, q_offsets, **_rule(problem))

    @staticmethod
    def backward(
        problem,
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        kv_offsets,
        q_offsets,
        *,
        schedule=None,
        step=None,
        deterministic=False,
        needs=(True, True, True),
    ):
        grads = reference.attention_backward(dout, dlse, q, k, v, kv_offsets, q_offsets, **_rule(problem))
        return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


def available(device: torch.device | str | None = None) -> dict[str, str | None]:
    """For each backend None when it can run on tensors of this device, or the reason why it cannot.

    ``device``: "cpu", "cuda", "cuda:1" and so on; without one the GPU if there is one, and the CPU otherwise.
    Asks the device for its compute capability, launches nothing, and never raises.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    return {"reference": None, **{name: _obstacle(name, device) for name in MODULES}}


def describe() -> str:
    """A few lines of text that say what runs on this machine, on which device, and why the rest does not."""
    devices = [("cpu", "CPU, kernels in the emulator")]
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        devices.append(("cuda", f"{torch.cuda.get_device_name()}, sm_{major}{minor}"))
    lines = []
    for device, title in devices:
        lines.append(f"{device} ({title})")
        for name, reason in available(device).items():
            lines.append(f"  {name:<10} {'runs' if reason is None else 'does not run: ' + reason}")
    if len(devices) == 1:
        lines.append("cuda: this PyTorch sees no GPU")
    return "\n".join(lines)


def select(name: str, problem: Problem, device: torch.device) -> str:
    """The backend that runs this call: ``name`` itself, or the choice of "auto".

    Raises RuntimeError when the backend cannot run on this machine, ValueError when it cannot run this call.
    """
    if name == "auto":
        name = _automatic(problem, device)
        if name in ARCHITECTURES:
            return name  # chosen because nothing stands against it
    if name == "reference":
        return name
    reason = _obstacle(name, device)
    if reason is not None:
        raise RuntimeError(f'backend="{name}" cannot run here: {reason} (backend="reference" can)')
    reason = importlib.import_module(MODULES[name]).supports(problem)
    if reason is not None:
        raise ValueError(f'backend="{name}" cannot run this call: {reason} (backend="reference" can)')
    return name


def module(name: str):
    """The object with ``supports``, ``forward`` and ``backward`` of a backend that ``select`` returned."""
    return Reference if name == "reference" else importlib.import_module(MODULES[name])


@contextlib.contextmanager
def running(name: str, device: torch.device):
    """Around a backend's work: the right current GPU, or for a kernel on CPU tensors the emulator.

    Who already stands inside ``jfa.emulator.emulate`` keeps that context, with its options and its reports;
    otherwise a fault that the emulator finds in the kernel is raised as an EmulationError. Autocast is off
    inside, because a kernel's own arithmetic is not the user's to cast.
    """
    cast = place = contextlib.nullcontext()
    if torch.is_autocast_enabled(device.type):
        cast = torch.autocast(device.type, enabled=False)
    if device.type == "cuda":
        place = torch.cuda.device(device)
    elif name in MODULES:
        place = _emulating(name)
    with cast, place:
        yield


@contextlib.contextmanager
def _emulating(name: str):
    from jfa import emulator

    if emulator.active() is not None:
        yield
        return
    with emulator.emulate(arch=ARCHITECTURES.get(name)) as emulation:
        yield
    for finding in emulation.errors():
        raise emulator.EmulationError(f'the kernel of backend="{name}" is at fault: {finding}')


def _automatic(problem: Problem, device: torch.device) -> str:
    if device.type != "cuda":
        return "reference"
    capability = _capability(device)
    for name in ARCHITECTURES:
        if CAPABILITIES[name] == capability and _obstacle(name, device) is None:
            if importlib.import_module(MODULES[name]).supports(problem) is None:
                return name
    return "triton"


def _obstacle(name: str, device: torch.device) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"kernels run on cuda and, in the emulator, on cpu tensors, not on {device.type}"
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "this PyTorch sees no GPU"
        if name in CAPABILITIES and _capability(device) != CAPABILITIES[name]:
            return "it needs compute capability {}.{}, this GPU has {}.{}".format(
                *CAPABILITIES[name], *_capability(device)
            )
        missing = _missing_triton(tlx=name in ARCHITECTURES)
        if missing is not None:
            return missing
    return _import_obstacle(MODULES[name], device.type == "cpu")


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _missing_triton(tlx: bool) -> str | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin == STANDIN:
        return "the package triton is not installed (pip install fbtriton, Linux only)"
    try:
        if tlx and importlib.util.find_spec("triton.language.extra.tlx") is None:
            return "the installed triton has no TLX (pip install fbtriton, over the one that torch brought)"
    except Exception as error:
        return f"triton does not import: {type(error).__name__}: {error}"
    return None


@functools.cache
def _import_obstacle(path: str, emulated: bool) -> str | None:
    """Why a kernel module does not import, in one sentence."""
    for name in ("jfa.emulator", path) if emulated else (path,):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (error.name == name or name.startswith(error.name + ".")):
                return f"{name} is not part of this version"
            return f"{name} needs the module {error.name}, which is not installed"
        except Exception as error:
            return f"{name} does not import: {type(error).__name__}: {error}"
    return None


def _rule(problem: Problem) -> dict:
    window = tuple(None if side < 0 else side for side in (problem.window_left, problem.window_right))
    return {"scale": problem.scale, "window": window}
