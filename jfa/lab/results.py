"""What the benchmark's rows say: the targets of speed with their values, and what other tables read of them.

    python -m jfa.lab.results [figures/09_results.csv [figures/09_memory.csv]]   print every target
    python -m jfa.lab.results --derive      write the rows of the figures 09_* from the recorded ones

Ratios are times of a peer over ours of one run and one process, so above 1 is faster than the peer.
"""

import argparse
import collections
import sys
from dataclasses import dataclass
from pathlib import Path

from jfa.lab import measure
from jfa.lab.cases import Case
from jfa.lab.figures import FOLDER
from jfa.lab.recorded import geometric_mean

RESULTS, EARLIER, SHORT = "09_results", "09_results_earlier", "09_results_short"  # the last run first
MEMORY, TUNING, CLOCKS, HOST, REACH = "09_memory", "09_tuning", "10_clocks", "09_host", "09_reach"
MEAN_DENSITIES = (0.1, 0.5, 0.9)  # of the 36 shapes whose mean counts
DIRECTIONS = ("forward", "backward")
OVER = {"forward": 2.3, "backward": 2.2}  # targets of the mean ratio over FA4 on jagged shapes
LEAST = 1.1  # and of each of them
NOTHING = "not measured yet"


def load(name: str, folder: Path = FOLDER) -> list[dict]:
    """The rows of figures/NAME.csv, none if there is no such file."""
    path = folder / f"{name}.csv"
    return measure.read_rows(path) if path.exists() else []


@dataclass(frozen=True)
class Measured:
    """Rows that were measured, by (case, direction, name, scope); of several the last one counts."""

    rows: dict

    @classmethod
    def of(cls, rows: list[dict]) -> "Measured":
        """Leave out what failed and what was predicted."""
        kept = [cls._numbers(row) for row in rows if row.get("timer") and row.get("ms_p50") not in (None, "")]
        keys = [
            (Case.of(row), row["direction"], row.get("name") or row["impl"], row["scope"]) for row in kept
        ]
        return cls(dict(zip(keys, kept, strict=True)))

    @staticmethod
    def _numbers(row):
        columns = (name for name in ("ms_p50", "tflops", "roof_tflops") if row.get(name) not in (None, ""))
        return dict(row) | {name: float(row[name]) for name in columns}

    def time(self, case: Case, direction: str, name: str = "jfa", scope: str = "call") -> float | None:
        """Median milliseconds, or None."""
        row = self.rows.get((case, direction, name, scope))
        return None if row is None else row["ms_p50"]

    def cases(self, chosen=lambda case: True) -> list[Case]:
        """The cases that something was measured of, in their order."""
        return [case for case in dict.fromkeys(key[0] for key in self.rows) if chosen(case)]

    def other_run(self, case: Case) -> str:
        """The commit of the run that measured a case, if it is not that of most rows; else ""."""
        commits = collections.Counter(row.get("commit", "") for row in self.rows.values())
        own = [row.get("commit", "") for key, row in self.rows.items() if key[0] == case]
        return "" if commits.most_common(1)[0][0] in own else own[0]

    def column(self, cases, direction, column, name="jfa", scope="call") -> list[float]:
        """A column of every case that was measured."""
        found = (self.rows.get((case, direction, name, scope)) for case in cases)
        return [float(row[column]) for row in found if row is not None and row[column] not in (None, "")]

    def ratios(self, cases, direction, peer="fa4", peer_scope="call") -> dict[Case, float]:
        """Time of the peer over that of our call, for the cases that both ran."""
        found = {}
        for case in cases:
            ours, theirs = self.time(case, direction), self.time(case, direction, peer, peer_scope)
            if ours is not None and theirs is not None:
                found[case] = theirs / ours
        return found

    def shares(self, cases, direction, flop_rate: float | None = None) -> list[float]:
        """Share of the roofline that our calls reach, or of one with another ``flop_rate`` in FLOP/s."""
        rows = {case: self.rows.get((case, direction, "jfa", "call")) for case in cases}
        found = {case: row for case, row in rows.items() if row is not None}
        if flop_rate is None:
            return [row["tflops"] / row["roof_tflops"] for row in found.values()]
        works = [(case.work(direction), row) for case, row in found.items()]
        least = [max(work.flops / flop_rate, work.memory_seconds) for work, _ in works]
        return [1e3 * seconds / row["ms_p50"] for seconds, (_, row) in zip(least, works, strict=True)]

    def behind_best(self) -> dict:
        """Time of the step that a call takes over the best step's, by (case, direction) with named steps.

        A step measured by name stands for the call that takes it: the same kernel timed twice differs by a
        few per cent, which says nothing about the choice.
        """
        best = {}
        for case, direction, name, scope in self.rows:
            if name.startswith("jfa:") and scope == "call":
                time = self.time(case, direction, name)
                best[case, direction] = min(time, best.get((case, direction), time))
        ours = {}
        for key in best:
            step = (self.rows.get((*key, "jfa", "call")) or {}).get("step")
            ours[key] = self.time(*key, f"jfa:{step}") or self.time(*key)
        return {key: ours[key] / best[key] for key in best if ours[key] is not None}


def plain(case: Case) -> bool:
    """Whether a case belongs to the main figure: broadcast-Q, 4 heads of 128, no mask."""
    return case == Case("jagged", case.M, case.N, case.density, case.B) and case.M in (128, 256, 512)


def averaged(case: Case) -> bool:
    """Whether a case is one of the 36 shapes whose mean counts."""
    return plain(case) and case.density in MEAN_DENSITIES


@dataclass(frozen=True)
class Target:
    """One target: at least (or at most) ``limit``, ``found`` over so many ``shapes``.

    ``found`` is None where nothing was measured. ``note`` names the case that decides, or another figure.
    """

    name: str
    limit: float
    found: float | None
    shapes: int
    at_least: bool = True
    unit: str = ""
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target was reached; None without a measurement."""
        if self.found is None:
            return None
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    @property
    def wanted(self) -> str:
        """The limit in words."""
        return f"{'at least' if self.at_least else 'at most'} {self.limit:g}{self.unit}"

    @property
    def measured(self) -> str:
        """The value in words."""
        return NOTHING if self.found is None else f"{self.found:.3g}{self.unit}"

    @property
    def verdict(self) -> str:
        """Reached or missed, in a word; empty without a measurement."""
        return {None: "", True: "reached", False: "missed"}[self.reached]

    def __str__(self):
        if self.found is None:
            return f"{self.measured:<17} {self.name}: {self.wanted}"
        values = f"{self.shapes} values{'; ' + self.note if self.note else ''}"
        return f"{self.verdict:<17} {self.name}: {self.measured}, {self.wanted} ({values})"


def described(case: Case) -> str:
    """A case in a few words."""
    rows = f"M={case.M}, " if case.suite in ("jagged", "histories") else ""
    density = "" if case.suite == "histories" else f", density {case.density:g}"
    return f"{case.suite} {rows}N={case.N}{density}{', causal' if case.causal else ''}"


def _mean(name, limit, values) -> Target:
    values = list(values)
    return Target(name, limit, geometric_mean(values) if values else None, len(values))


def _least(name, limit, by_case: dict) -> Target:
    if not by_case:
        return Target(name, limit, None, 0)
    case = min(by_case, key=by_case.get)
    mean = f"least at {described(case)}; mean {geometric_mean(by_case.values()):.3g}"
    return Target(name, limit, by_case[case], len(by_case), note=mean)


def targets(rows: list[dict], memory: list[dict] = ()) -> list[Target]:
    """Every target of speed with its value from the benchmark's rows; where none counts, found is None."""
    found = Measured.of(rows)
    mean_cases = found.cases(averaged)
    result = []
    for direction, over in OVER.items():
        ratios = found.ratios(mean_cases, direction)
        result.append(_mean(f"jagged {direction} over FA4, geometric mean", over, ratios.values()))
        if direction == "forward":
            expanded = found.ratios(mean_cases, direction, peer_scope="kernel")
            name = "jagged forward over FA4 with q expanded beforehand, geometric mean"
            result.append(_mean(name, 1.9, expanded.values()))
    for direction in DIRECTIONS:
        every = found.ratios(found.cases(plain), direction)
        result.append(_least(f"jagged {direction} over FA4, least of all shapes", LEAST, every))
    for direction, share in zip(DIRECTIONS, (0.75, 0.66)):
        name = f"jagged {direction}, share of the roofline, geometric mean"
        result.append(_mean(name, share, found.shares(mean_cases, direction)))
    for suites, limits in ((("histories",), (2.0, 2.0)), (("dense", "packed"), (1.15, 1.1))):
        cases = found.cases(lambda case, suites=suites: case.suite in suites)
        for direction, limit in zip(DIRECTIONS, limits):
            name = f"{' and '.join(suites)} {direction} over FA4, least of all shapes"
            result.append(_least(name, limit, found.ratios(cases, direction)))
        if "dense" in suites:
            name = "dense and packed forward over cuDNN, least of all shapes"
            result.append(_least(name, 1.0, found.ratios(cases, "forward", peer="cudnn")))
    result += [_memory(memory, "a shared query", ("jagged", "histories"))]
    result += [_memory(memory, "packed queries", ("dense", "packed"))]
    return [*result, _dispatcher(found), _schedule(found), _error(found)]


def _memory(rows, label, suites) -> Target:
    name = f"peak extra memory of a training step with {label}, of K and V, most of all shapes"
    chosen = [row for row in rows if row["suite"] in suites]
    shares = {impl: [100 * r["share_of_kv"] for r in chosen if r["impl"] == impl] for impl in ("jfa", "fa4")}
    mine, theirs = shares["jfa"], shares["fa4"]
    note = f"least {min(mine):.3g} %" if mine else ""
    note += f", FA4 {min(theirs):.3g} to {max(theirs):.3g} %" if theirs else ""
    return Target(name, 1.0, max(mine) if mine else None, len(mine), False, " %", note)


def _dispatcher(found: Measured) -> Target:
    behind = found.behind_best()
    if not behind:
        return Target(
            "the dispatcher's step behind the best one, most of all shapes", 5.0, None, 0, False, " %"
        )
    case, direction = key = max(behind, key=behind.get)
    note = f"most at {described(case)} {direction}"
    name = "the dispatcher's step behind the best one, most of all shapes"
    return Target(name, 5.0, 100 * (behind[key] - 1), len(behind), False, " %", note)


def _schedule(found: Measured) -> Target:
    times = [row["ms_p50"] for key, row in found.rows.items() if key[3] == "schedule" and key[0].B == 768]
    name = "making a schedule of 768 sequences, most of all shapes"
    return Target(name, 15.0, 1e3 * max(times) if times else None, len(times), False, " us")


def _error(found: Measured) -> Target:
    rows = [row for key, row in found.rows.items() if row["impl"] == "jfa" and key[3] != "schedule"]
    shares = [float(row["budget_share"]) for row in rows if row.get("budget_share") not in (None, "")]
    name = "share of its error budget that a measured call of ours used, most of all"
    return Target(name, 1.0, max(shares) if shares else None, len(shares), False)


def targets_text(rows: list[dict], memory: list[dict] = ()) -> str:
    """Every target as a line."""
    return "\n".join(map(str, targets(rows, memory)))


def reached(rows: list[dict]) -> list[bool]:
    """Of every target that these rows can decide, whether it was reached; memory is that of the last run."""
    return [target.reached for target in targets(rows, load(MEMORY)) if target.reached is not None]


def main(arguments: list[str] | None = None) -> int:
    """Print the targets, or write the derived rows."""
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.results", description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, default=FOLDER / f"{RESULTS}.csv")
    parser.add_argument("memory", nargs="?", type=Path, default=FOLDER / f"{MEMORY}.csv")
    parser.add_argument("--derive", action="store_true", help="write the rows of figures drawn from others")
    options = parser.parse_args(arguments)
    for path, column in ((options.rows, "ms_p50"), (options.memory, "share_of_kv")):
        if not options.derive and (problem := measure.unreadable(path, column)):
            parser.error(problem)
    from jfa.lab import derived, readme

    if options.derive:
        try:
            print("\n".join(derived.write_all()))
        except ValueError as error:
            parser.error(str(error))
        return 0
    rows, memory = (load(path.stem, path.parent) for path in (options.rows, options.memory))
    try:
        text = [targets_text(rows, memory), readme.table(readme.lines_of(Measured.of(rows)))]
        text += [derived.spread_text(earlier, rows)] if (earlier := load(EARLIER)) else []
    except (TypeError, ValueError) as error:  # a word where a number belongs
        parser.error(f"{options.rows} or {options.memory}: {error}")
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
