"""Time our kernels and other people's beside them, in one process and in turn.

    python -m jfa.lab.bench --suite jagged --impl jfa fa4 --output figures/09_results.csv

A case is prepared for every implementation, checked against a float32 computation, and timed in rounds of
CUDA graph replays, in turn (eager calls where a graph cannot be captured). One row a measurement: forward
and backward, the whole call as a user writes it ("call") and the kernels alone ("kernel"). An implementation
that cannot run a case leaves a row that says why. FLOPs are those of the real lengths.
"""

import argparse
import contextlib
import time

import torch

from jfa.lab import flops, measure
from jfa.lab.cases import SUITES, Case, Inputs, make_inputs
from jfa.lab.peers import PEERS, Unsupported

CHUNK = 32  # sequences that the check pads together


def expected(inputs: Inputs) -> dict[str, torch.Tensor]:
    """out, dq, dk and dv in float32 (IEEE products), computed on padded chunks of sequences."""
    case = inputs.case
    results = {
        "out": torch.zeros(inputs.dout.shape, device=inputs.q.device),
        "dq": torch.zeros(inputs.q.shape, device=inputs.q.device),
        "dk": torch.zeros(inputs.k.shape, device=inputs.q.device),
        "dv": torch.zeros(inputs.v.shape, device=inputs.q.device),
    }
    starts = inputs.kv_offsets[:-1].long()
    order = inputs.lengths.argsort()  # equal lengths together: little padding
    for first in range(0, case.B, CHUNK):
        _expect_chunk(inputs, order[first : first + CHUNK].to(starts.device), starts, results)
    return results


def _expect_chunk(inputs, chunk, starts, results) -> None:
    case, device = inputs.case, inputs.q.device
    lengths = inputs.lengths.to(device)[chunk]
    longest = int(lengths.max())
    if longest == 0:
        return
    slots = torch.arange(longest, device=device)
    real = slots < lengths[:, None]
    rows = (starts[chunk, None] + slots).clamp_(max=inputs.k.shape[0] - 1)
    group = case.Hq // case.Hkv
    shared = inputs.q_offsets is None
    k, v = (x.float()[rows].repeat_interleave(group, 2).requires_grad_() for x in (inputs.k, inputs.v))
    if shared:
        q = inputs.q.float().expand(len(chunk), *inputs.q.shape).clone().requires_grad_()
        dout = inputs.dout[chunk].float()
        offset = lengths[:, None] - case.M + torch.arange(case.M, device=device)
    else:
        q = inputs.q.float()[rows].requires_grad_()
        dout = inputs.dout.float()[rows] * real[:, :, None, None]
        offset = slots.expand(len(chunk), -1)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * case.D**-0.5
    seen = real[:, None, :].expand(-1, q.shape[1], -1)
    left, right = (None, None) if case.window is None else case.window
    if case.causal:
        right = 0
    if right is not None:
        seen = seen & (slots <= offset[:, :, None] + right)
    if left is not None:
        seen = seen & (slots >= offset[:, :, None] - left)
    weights = torch.where(seen[:, None], scores, -torch.inf).softmax(-1)
    weights = torch.where(seen[:, None], weights, 0)  # a row that sees nothing
    out = torch.einsum("bhmn,bnhd->bmhd", weights, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    packed = rows[real]
    for name, x in (("dk", dk), ("dv", dv)):
        results[name][packed] = x[real].unflatten(1, (case.Hkv, group)).sum(2)
    if shared:
        results["out"][chunk] = out.detach()
        results["dq"] += dq.sum(0)
    else:
        results["out"][packed] = out.detach()[real]
        results["dq"][packed] = dq[real]


def relative_error(found, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was wanted."""
    return float((found.detach().float() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def errors(run, wanted: dict[str, torch.Tensor], inputs: Inputs, scope: str) -> dict[str, float]:
    """Largest relative error of each direction; nan where the peer's own layout is not ours."""
    out = run.forward()
    forward = relative_error(out.reshape(wanted["out"].shape), wanted["out"])
    grads = dict(zip(("dq", "dk", "dv"), run.backward(), strict=True))
    same = {name: x for name, x in grads.items() if x.shape == wanted[name].shape}
    backward = [relative_error(x, wanted[name]) for name, x in same.items()]
    return {"forward": forward, "backward": max(backward, default=float("nan"))}


def prepare(inputs: Inputs, impls: list[str], scope: str) -> tuple[dict, dict]:
    """Runs by implementation, and the reasons of those that cannot run the case."""
    runs, reasons = {}, {}
    for name in impls:
        try:
            runs[name] = PEERS[name](inputs, scope)
        except (Unsupported, ImportError, RuntimeError, ValueError, TypeError, AssertionError) as error:
            text = str(error).splitlines()
            reasons[name] = f"{type(error).__name__}: {text[0][:160] if text else ''}"
    return runs, reasons


def in_turn(functions, rounds: int, sample_ms: float, graph: bool) -> list[dict]:
    """Interleaved rows; what cannot be captured in a graph is timed again in eager calls, and says so."""
    if not functions:
        return []
    options = {"sample_ms": sample_ms, "warmup_ms": sample_ms, "keep_going": True}
    rows = measure.interleave(functions, rounds, graph=graph, **options)
    failed = {row["name"]: functions[row["name"]] for row in rows if row["error"]}
    if graph and failed:
        rows = [row for row in rows if not row["error"]] + in_turn(failed, rounds, sample_ms, False)
    return rows


def measure_case(
    case: Case, impls, directions, scopes, rounds: int, sample_ms: float, graph: bool
) -> list[dict]:
    """All rows of one case."""
    inputs = make_inputs(case)
    wanted = expected(inputs)
    window = (None, None) if case.window is None else case.window
    query = case.M if inputs.q_offsets is None else inputs.query_lengths
    rows = []
    for scope in scopes:
        runs, reasons = prepare(inputs, impls, scope)
        found = {}
        for name in list(runs):
            try:
                found[name] = errors(runs[name], wanted, inputs, scope)
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                reasons[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
                del runs[name]
        for direction in directions:
            work = flops.roofline(
                inputs.lengths,
                query,
                case.Hq,
                case.D,
                direction,
                Hkv=case.Hkv,
                causal=case.causal,
                window=window,
            )
            functions = {name: getattr(run, direction) for name, run in runs.items()}
            timed = in_turn(functions, rounds, sample_ms, graph)
            timed += [
                {"name": name, "error": reason, **measure.provenance()} for name, reason in reasons.items()
            ]
            for row in timed:
                name = row["name"]
                row |= case.columns() | {"direction": direction, "scope": scope, "impl": name}
                row["rel_error"] = found.get(name, {}).get(direction, "")
                rows.append(measure.add_work(row, work))
    return rows


def selected(arguments) -> list[Case]:
    """The cases that the command line asks for."""
    cases = [case for suite in arguments.suite for case in SUITES[suite]()]
    for column in ("M", "N", "density"):
        wanted = getattr(arguments, column)
        if wanted:
            cases = [case for case in cases if getattr(case, column) in wanted]
    return cases


def show(row: dict) -> str:
    """One measurement as a line."""
    shape = f"{row['suite']} M={row['M']} N={row['N']} s={row['density']} {row['direction']} {row['scope']}"
    if row.get("error"):
        return f"{shape} {row['impl']}: {row['error']}"
    return (
        f"{shape} {row['impl']}: {row['ms_p50'] * 1e3:.0f} us, {row['tflops']:.0f} TFLOPS "
        f"of {row['roof_tflops']:.0f}, error {row['rel_error']:.4f}"
    )


def main(argv=None) -> int:
    """Measure the selected cases and write their rows as they come."""
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=["jagged"])
    parser.add_argument("--impl", nargs="+", choices=list(PEERS), default=["jfa", "jfa_baseline", "fa4"])
    parser.add_argument(
        "--direction", nargs="+", choices=["forward", "backward"], default=["forward", "backward"]
    )
    parser.add_argument("--scope", nargs="+", choices=["call", "kernel"], default=["call"])
    parser.add_argument("--M", nargs="+", type=int)
    parser.add_argument("--N", nargs="+", type=int)
    parser.add_argument("--density", nargs="+", type=float)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sample-ms", type=float, default=10.0)
    parser.add_argument("--eager", action="store_true", help="time eager calls instead of graph replays")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no case after so long")
    parser.add_argument("--output", help="CSV to write; rows are appended")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to measure here")
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.monotonic()
    stream = torch.cuda.Stream()  # a graph captures a backward pass only on the stream of its forward pass
    for case in selected(arguments):
        if time.monotonic() - start > arguments.limit_s:
            print(f"not measured, {arguments.limit_s:.0f} s are over: {case}", flush=True)
            continue
        with torch.cuda.stream(stream), contextlib.suppress(KeyboardInterrupt):
            rows = measure_case(
                case,
                arguments.impl,
                arguments.direction,
                arguments.scope,
                arguments.rounds,
                arguments.sample_ms,
                not arguments.eager,
            )
        for row in rows:
            print(show(row), flush=True)
        if arguments.output:
            measure.write_rows(arguments.output, rows, append=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
