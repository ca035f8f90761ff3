"""What stays on chip in the last step: bytes that it and the step before move, counted in the emulator."""

from jfa.lab.pair import BLOCK

QUERIES, SEQUENCES = 128, 12
STEPS = ("peeled", "stationary")
# Descriptors of both kernels -> the tensor as people call it.
TENSORS = {
    "q": "Q", "k": "K", "v": "V", "o": "O", "dout": "dO",
    "dq": "dQ", "sums": "dQ", "dk": "dK", "dv": "dV", "grad": "dK, dV",
}  # fmt: skip
MOVES = {"tma_load": "read", "tma_store": "written", "tma_reduce": "added"}


def lengths_of(count: int = SEQUENCES) -> list[int]:
    """The first real histories."""
    from jfa import jagged

    return jagged.history_lengths()[:count].tolist()


def moved(step, lengths=None, queries: int = QUERIES) -> dict[tuple[str, str], float]:
    """(tensor, how) -> bytes that a Hopper step moves by TMA for 128 x 128 useful scores.

    ``how`` is "read", "written" or "added". One head of 128; the emulator's CTAs share the work.
    """
    import torch

    from jfa import emulator
    from jfa.lab import ladder

    lengths = lengths_of() if lengths is None else lengths
    problem = ladder.problem_of(lengths, queries, 1, 128)
    tensors = ladder.tensors_of(problem, lengths)
    dout = torch.ones(problem.out_shape, dtype=problem.dtype)
    with emulator.emulate(arch=ladder.TARGETS[step.arch], policy="eager", trace=True) as machine:
        ladder.run_step(step, problem, *tensors, dout)
    (report,) = (report for report in machine.reports if report.kernel == "kernel")
    found: dict = {}
    for event in report.events:
        kind = event[6].get("kind") if event[3] == "issue" else None
        if kind in MOVES:
            name = event[6]["desc"].removeprefix("desc_")
            key = TENSORS[name], MOVES[kind]
            found[key] = found.get(key, 0) + event[6]["bytes"]
    blocks = sum(lengths) * queries / BLOCK**2
    return {key: count / blocks for key, count in found.items()}


def rows() -> list[dict]:
    """KiB by direction, step, tensor and how it moves (09_onchip)."""
    from jfa import steps

    table = []
    for direction in ("forward", "backward"):
        for name in STEPS:
            for (tensor, how), count in moved(steps.find("hopper", direction, name)).items():
                columns = {"direction": direction, "step": name, "tensor": tensor, "how": how}
                table.append({**columns, "kib": round(count / 1024, 3)})
    return table


def left(rows) -> dict[str, float]:
    """KiB of the backward pass: "before", with Q and dQ "kept" on chip and no other change, and the "last".

    ``rows`` are those of `rows`; "kept" takes Q and dQ of the last step and the rest of the step before.
    """
    first, last = (
        {(row["tensor"], row["how"]): row["kib"] for row in rows if (row["direction"], row["step"]) == key}
        for key in (("backward", name) for name in STEPS)
    )
    kept = [size for (tensor, _), size in first.items() if tensor not in ("Q", "dQ")]
    kept += [size for (tensor, _), size in last.items() if tensor in ("Q", "dQ")]
    return {"before": sum(first.values()), "kept": sum(kept), "last": sum(last.values())}
