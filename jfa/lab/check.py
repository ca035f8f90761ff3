"""Whether a kernel is right: an error budget that comes from the computation itself; claims that are counted.

An answer may differ from the float64 definition by twice what PyTorch's own computation in the input's dtype
differs, plus one rounding of the result. The same budget must refuse wrong answers, which `must_fail` shows.

What PyTorch's answer and the rounding differ by is measured, which takes many values. lse has few: a
sequence whose scores are equal has one, log n, and by luck (n = 257) PyTorch misses it by 0.01 units in the
last place. A kernel that keeps its statistics in log2 units rounds three times, log2(l), its sum with the
maximum, and the product with ln 2, by half a unit at most each. So for lse neither PyTorch's error nor the
rounding counts as less than half a unit: together three halves, where scores bring no larger error.
"""

import html
import inspect
import math
from dataclasses import dataclass

import torch

from jfa import reference
from jfa.lab.answers import Inputs, compute, wrong_answers

QUANTITIES = ("out", "lse", "dq", "dk", "dv")
# Float32 sums of a kernel leave noise even where the exact answer cancels to nothing and PyTorch's rounding
# happens to cancel too (a sequence of one key has no dk). Relative to the quantity's root mean square.
FLOAT32_NOISE = 2.0**-16


class ClaimError(AssertionError):
    """A notebook's claim does not hold."""


_claims = []  # [text, whether it held] of every call of claim in this process


def claim(text, condition):
    """Print that a claim holds, or raise ClaimError; ``condition`` is a bool, also as an array or tensor.

    What was claimed is remembered (`claims`): the notebook runner counts that, not what is printed, and takes
    a claim that raised as failed whoever caught the exception.
    """
    _claims.append([str(text), False])
    if not isinstance(text, str):
        raise TypeError(f"claim: expected the text first, got {text!r}")
    if hasattr(condition, "item"):
        condition = condition.item()
    if not isinstance(condition, bool):
        raise TypeError(f"claim: expected a bool, got {condition!r}")
    if not condition:
        raise ClaimError(f"claim does not hold: {text}")
    _claims[-1][1] = True
    print(f"claim holds: {text}")


def claims():
    """The claims of this process: {"held": [text, ...], "failed": [text, ...]} in their order."""
    found = {"held": [], "failed": []}
    for text, held in _claims:
        found["held" if held else "failed"].append(text)
    return found


@dataclass(frozen=True)
class Row:
    """One quantity's verdict where it is worst: error and budget in its unit, ratio error / budget."""

    quantity: str
    error: float
    budget: float
    measure: str
    where: str
    note: str = ""

    @property
    def ratio(self):
        """Share of the budget used: above 1 fails, inf where nothing is allowed."""
        if self.note or not math.isfinite(self.error):
            return math.inf
        return self.error / self.budget if self.error else 0.0

    @property
    def passed(self):
        """Whether the error is within the budget and nothing else is wrong."""
        return self.ratio <= 1


class Table:
    """Rows of a verdict; prints aligned text, shows as HTML in a notebook."""

    columns = ("quantity", "error", "budget", "ratio", "measure", "where", "passed", "note")

    def __init__(self, rows):
        self.rows = list(rows)

    def __getitem__(self, quantity):
        return next(row for row in self.rows if row.quantity == quantity)

    @property
    def passed(self):
        """Whether every row passed, and there is one."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def worst(self):
        """The row that uses most of its budget."""
        return max(self.rows, key=lambda row: row.ratio)

    def check(self):
        """Raise AssertionError with the table unless everything passed; gives the table itself."""
        if not self.passed:
            raise AssertionError(f"outside the error budget\n{self}")
        return self

    def _cells(self):
        def show(value):
            return f"{value:.3g}" if isinstance(value, float) else str(value)

        return [list(self.columns)] + [
            [show(getattr(row, name)) for name in self.columns] for row in self.rows
        ]

    def __str__(self):
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)) for line in cells]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self):
        head, *body = self._cells()
        rows = [("th", head)] + [("td", line) for line in body]
        cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) for tag, line in rows)
        return "<table>" + "".join(f"<tr>{line}</tr>" for line in cells) + "</table>"


@dataclass(frozen=True)
class Expected:
    """The exact answer of a call, PyTorch's answer in the input's dtype, and so the budget of any other."""

    inputs: Inputs
    exact: dict
    low: dict

    def check(self, results):
        """Table of every quantity of ``results`` (a dict by name; missing ones are not looked at).

        Raises ValueError for a wrong name or shape.
        """
        unknown = [name for name in results if name not in self.exact]
        if unknown:
            raise ValueError(f"results: expected some of {', '.join(self.exact)}, got {', '.join(unknown)}")
        return Table(self._row(name, results[name]) for name in QUANTITIES if name in results)

    def _row(self, quantity, result):
        exact, low = self.exact[quantity], self.low[quantity]
        if result is None:
            return Row(quantity, math.inf, 0.0, "", "all", "nothing came back")
        if result.shape != exact.shape:
            raise ValueError(f"{quantity}: expected shape {tuple(exact.shape)}, got {tuple(result.shape)}")
        note = self._note(quantity, result)
        if note:
            return Row(quantity, math.inf, 0.0, "", "all", note)
        rounded = exact.to(result.dtype).double()
        blind = torch.isinf(exact)
        errors, lows, roundings = (
            (x.double() - exact).abs().masked_fill(blind, 0) for x in (result, low, rounded)
        )
        if quantity == "lse":
            roundings = _half_unit(exact.masked_fill(blind, 0), result.dtype)
            lows = torch.maximum(lows, roundings)
        noise = FLOAT32_NOISE * _rms(exact.masked_fill(blind, 0))
        found = [_measured(quantity, "max", "all", _max, errors, lows, roundings, 0.0)]
        found.append(_measured(quantity, "rms", "all", _rms, errors, lows, roundings, 0.0))
        for b, keys in enumerate(self.inputs.keys):
            at = self.inputs.part(quantity, b)
            if at is None or errors[at].numel() == 0:
                continue
            allowed = noise if keys.stop > keys.start else 0.0
            parts = (errors[at], lows[at], roundings[at])
            found.append(_measured(quantity, "rms", f"sequence {b}", _rms, *parts, allowed))
        return max(found, key=lambda row: row.ratio)

    def _note(self, quantity, result):
        """What is wrong with a result beyond its size, or nothing."""
        exact, low = self.exact[quantity], self.low[quantity]
        for what, x in (("the exact answer", exact), ("PyTorch's answer", low), ("the result", result)):
            if torch.isnan(x).any():
                return f"NaN in {what}"
        if not torch.equal(torch.isinf(exact), torch.isinf(result)) or (result == math.inf).any():
            return "infinite where it should not be, or finite where it should be -inf"
        blind = torch.isneginf(self.exact["lse"])
        if quantity in ("out", "dq") and (quantity == "out" or self.inputs.q_offsets is not None):
            if (result[blind.transpose(-1, -2)] != 0).any():
                return "not exactly 0 in a row that sees no key"
        if quantity in ("dk", "dv") and (result[int(self.inputs.kv_offsets[-1]) :] != 0).any():
            return "not exactly 0 past the last offset"
        return ""


def _half_unit(exact, dtype):
    """Half a unit in the last place of every value in a dtype: what one rounding is off by at most."""
    _, exponent = torch.frexp(exact)  # |value| is in [2 ** (exponent - 1), 2 ** exponent)
    halves = torch.ldexp(torch.full_like(exact, torch.finfo(dtype).eps / 4), exponent)
    return halves.masked_fill(exact == 0, 0)


def _max(x):
    return float(x.max()) if x.numel() else 0.0


def _rms(x):
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _measured(quantity, measure, where, size, errors, lows, roundings, extra):
    return Row(quantity, size(errors), 2 * size(lows) + size(roundings) + extra, measure, where)


def expected(
    q,
    k,
    v,
    kv_offsets,
    q_offsets=None,
    *,
    scale=None,
    causal=False,
    window=(None, None),
    gradients=True,
    dout=None,
    dlse=None,
    through_lse=True,
    seed=0,
):
    """The Expected of one call; arguments as in ``jfa.jagged_flash_attention``.

    ``dout`` and ``dlse`` are the incoming gradients; without them normal ones are drawn from ``seed``
    (``through_lse`` False: none for lse). ``gradients`` False looks at out and lse alone.
    """
    draw = torch.Generator().manual_seed(seed)
    plain = Inputs(
        q.detach(), k.detach(), v.detach(), kv_offsets, q_offsets, scale, causal, window, None, None
    )
    shapes = {name: x.shape for name, x in compute(plain, q.dtype).items()}
    if gradients:
        if dout is None:
            dout = torch.randn(shapes["out"], generator=draw).to(q.dtype).to(q.device)
        if dlse is None and through_lse:
            dlse = torch.randn(shapes["lse"], generator=draw).to(q.device)
    inputs = Inputs(plain.q, plain.k, plain.v, kv_offsets, q_offsets, scale, causal, window, dout, dlse)
    args = (inputs.q, inputs.k, inputs.v, kv_offsets, q_offsets)
    exact = dict(zip(("out", "lse"), reference.attention(*args, **inputs.rule, dtype=torch.float64)))
    if gradients:
        grads = reference.attention_backward(dout, dlse, *args, **inputs.rule, dtype=torch.float64)
        exact |= dict(zip(("dq", "dk", "dv"), grads))
    return Expected(inputs, exact, compute(inputs, q.dtype))


def results_of(call, inputs, **options):
    """Every quantity that a callable with the public signature gives, gradients by autograd."""
    leaves = [
        x.detach().clone().requires_grad_(inputs.dout is not None) for x in (inputs.q, inputs.k, inputs.v)
    ]
    parameters = inspect.signature(call).parameters
    if "return_lse" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        options = {"return_lse": True, **options}
    out, lse = call(*leaves, inputs.kv_offsets, inputs.q_offsets, **inputs.rule, **options)
    found = {"out": out.detach(), "lse": lse.detach()}
    if inputs.dout is not None:
        results, incoming = [out], [inputs.dout]
        if inputs.dlse is not None:
            results, incoming = [out, lse], [inputs.dout, inputs.dlse.to(lse.dtype)]
        grads = torch.autograd.grad(results, leaves, incoming, allow_unused=True)
        found |= dict(zip(("dq", "dk", "dv"), grads))
    return found


def check_attention(call, q, k, v, kv_offsets, q_offsets=None, *, options=None, **rule):
    """Table of a callable with the public signature against its error budget; ``.check()`` raises.

    ``rule`` goes to `expected` (scale, causal, window, gradients, seed, ...), ``options`` to the call only
    (backend, step, ...).
    """
    wanted = expected(q, k, v, kv_offsets, q_offsets, **rule)
    return wanted.check(results_of(call, wanted.inputs, **(options or {})))


def must_fail(wanted):
    """(wrong answer, quantities that refuse it, largest ratio) of each; raises if one passes."""
    verdicts = []
    for name, found in wrong_answers(wanted.inputs, wanted.exact, wanted.low).items():
        table = wanted.check(found)
        refused = tuple(row.quantity for row in table.rows if not row.passed)
        if not refused:
            raise AssertionError(f"the check accepts {name}\n{table}")
        verdicts.append((name, refused, table.worst.ratio))
    return verdicts
