"""Small things that every notebook uses: the setup line, and predictions printed beside what was observed."""

import logging
import math
import platform

from jfa.lab import pins

# The ladder in the order of the course: name, idea, and what it changes (F forward, B backward).
LADDER = (
    ("baseline", "compiler-scheduled Triton, one warp group does everything", "F B"),
    ("warp_specialized", "roles that pass tiles through rings, persistent CTAs", "F B"),
    ("balanced", "tiles dealt by their work, not in their natural order", "F B"),
    ("dynamic", "tiles handed out at run time; forward, also a second Q tile", "F B"),
    ("dq_staged", "one slice's reduce-add overlaps the next slice's copy", "B"),
    ("dq_released", "dQ gives up its columns (Blackwell) or registers (Hopper) earlier", "B"),
    ("peeled", "masks only in blocks with an edge: two loops, or a branch", "F B"),
    ("staged", "the output leaves through a tile of its own, not through Q's", "F"),
    ("two_cta", "two CTAs share loads, on Blackwell each matrix product too", "B"),
    ("ds_buffered", "Hopper: a second dS and a third Q and dO, so the groups meet once a block", "B"),
    ("lean", "Blackwell: fewer exponentials and rescalings, packed arithmetic", "F"),
    ("stationary", "beyond the paper: the shared query and its gradient stay on chip", "F B"),
)


LIVE = "measures live"  # what `setup` says where there is a GPU


def gpu() -> str | None:
    """Return the name of the current GPU, or None where PyTorch sees none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def setup() -> str:
    """Return one line: what this notebook runs on, with which versions, and so what it measures."""
    # torch's nested tensors make torch.fx warn of one of torch's own functions: no news for a reader.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    device = gpu()
    where = f"{device}: {LIVE}" if device else "CPU: kernels run in the emulator, no time is measured"
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {pins.version_of(name) or 'missing'}" for name in ("torch", "fbtriton")]
    return " · ".join([where, *versions])


# Where an observed number comes from, by the word that `Predictions.observe` takes.
SOURCES = {
    "measured": "measured on a GPU",
    "data": "counted in the data",
    "emulator": "counted in the emulator",
    "compiler": "the compiler's report",
    "model": "another model, not measured",
}


class Predictions:
    """Numbers stated before a result, printed beside it afterwards.

    ``Predictions(waste=0.5)`` states one; ``observe("waste", 0.44, by="data")`` records what came out, and by
    which of `SOURCES`, and returns it. ``str`` gives the table. A prediction holds when the observed value is
    within a factor of ``within``.
    """

    def __init__(self, within: float = 1.5, **numbers: float):
        if within < 1:
            raise ValueError(f"within: expected a factor of 1 or more, got {within}")
        self.within = within
        self.predicted = dict(numbers)
        self.observed: dict[str, float] = {}
        self.by: dict[str, str] = {}

    def observe(self, name: str, value: float, by: str = "") -> float:
        """Record the observed value of a prediction, and by which of `SOURCES` it became known.

        Raises KeyError for a prediction that was never stated, ValueError for another source.
        """
        if name not in self.predicted:
            raise KeyError(f"{name!r} was not predicted; the predictions are {sorted(self.predicted)}")
        if by and by not in SOURCES:
            raise ValueError(f"by: expected one of {', '.join(SOURCES)}, got {by!r}")
        self.observed[name], self.by[name] = float(value), SOURCES.get(by, "")
        return self.observed[name]

    def holds(self, name: str) -> bool:
        """Whether the observed value is finite and within the factor of the predicted one."""
        predicted, observed = self.predicted[name], self.observed[name]
        if not math.isfinite(observed) or predicted * observed <= 0:
            return predicted == observed
        return max(predicted / observed, observed / predicted) <= self.within

    def __str__(self) -> str:
        width = max(len("quantity"), *(len(name) for name in self.predicted))
        lines = [f"{'quantity':<{width}}  predicted  observed  within {self.within:g}x  observed by"]
        room = len(f"within {self.within:g}x")
        for name, predicted in self.predicted.items():
            line = f"{name:<{width}}  {predicted:9.3g}  "
            if name in self.observed:
                verdict = "yes" if self.holds(name) else "no"
                line += f"{self.observed[name]:8.3g}  {verdict:<{room}}  {self.by[name]}".rstrip()
            else:
                line += f"{'-':>8}  not yet"
            lines.append(line)
        return "\n".join(lines)


def compiler_missing() -> str | None:
    """Return why kernels cannot be compiled here, or None; on Linux the pinned fbtriton brings it all."""
    import importlib.util

    if importlib.util.find_spec("triton") is None:
        return "not compiled here: Triton is not installed (fbtriton has wheels for Linux only)"
    from jfa.lab import toolchain

    missing = [name for name in ("ptxas", "nvdisasm") if toolchain.locate(name) is None]
    return f"not compiled here: {' and '.join(missing)} not found" if missing else None
