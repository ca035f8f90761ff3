"""Measurements recorded on a GPU: read, summarized for README, described in a notebook, or made live.

They lie in figures/NN_name.csv with the columns of `jfa.lab.measure`. A row counts as measured when it has a
timer and a time; rows of predictions and of peers that could not run are left out.
"""

import math
import warnings
from pathlib import Path

from jfa.lab import figures

README = figures.ROOT / "README.md"
BEGIN = "<!-- measured: written by `make readme` from the CSVs of figures/ -->\n"
END = "<!-- /measured -->"
NOTHING = "Nothing has been measured yet: there is no `figures/02_*.csv`.\n"
PROVENANCE = ("gpu", "driver", "cuda", "torch", "fbtriton", "commit", "power_limit_w", "date")
KEYS = ["suite", "direction", "scope"]


def measured(prefix: str, folder: Path = figures.FOLDER):
    """Return the measured rows of every figures/PREFIX*.csv as one pandas DataFrame, empty if there is none.

    The column ``peer`` says what ran: the row's ``impl`` or, without one, its ``name``.
    """
    import pandas

    tables = [
        pandas.read_csv(path, dtype={"commit": str, "window": str}) for path in folder.glob(f"{prefix}*.csv")
    ]
    tables = [
        table[table["ms_p50"].notna() & table["timer"].notna()] for table in tables if "ms_p50" in table
    ]
    if not tables:
        return pandas.DataFrame()
    rows = pandas.concat(tables, ignore_index=True)
    names = [rows[column] for column in ("impl", "name") if column in rows]
    rows["peer"] = names[0].fillna(names[-1])
    if "name" in rows:  # "jfa:step" is a step that was asked for by name, not what a call chooses
        rows = rows[~rows["name"].astype(str).str.contains(":")].reset_index(drop=True)
    return rows


def timed(rows):
    """The rows of a DataFrame that have a time, of the scope that a user sees if it was recorded."""
    import pandas

    rows = rows.assign(tflops=pandas.to_numeric(rows["tflops"], errors="coerce"))
    rows = rows[rows["tflops"].notna()]  # empty where a step did not run
    if "scope" in rows and len(rows):
        scope = "call" if (rows["scope"] == "call").any() else rows["scope"].iloc[0]
        rows = rows[rows["scope"] == scope]
    return rows.copy()


def speeds_text(rows, names, title: str, index=("M", "N", "density")) -> str:
    """TFLOPS of steps by shape from `timed` rows under a title, with the provenance of what is shown."""
    from jfa.lab import style

    chosen = rows[rows["step"].isin(names)]
    table = chosen.pivot_table(index=list(index), columns="step", values="tflops")
    shown = table[[name for name in names if name in table]].round(0)
    return f"{title}\n{shown.to_string()}\n{style.caption(chosen)}"


def provenance_lines(rows) -> list[str]:
    """Return one line for each machine and set of versions that the rows come from, all its commits in it."""
    found = rows.reindex(columns=PROVENANCE).astype(object).fillna("unknown").drop_duplicates()
    others = [name for name in PROVENANCE if name != "commit"]
    found = found.groupby(others, sort=False)["commit"].agg(" and ".join).reset_index().sort_values("date")
    words = ("", "driver ", "CUDA ", "torch ", "fbtriton ", "commit ", "power limit ", "")
    labels = dict(zip(PROVENANCE, words, strict=True))
    lines = []
    for row in found.to_dict("records"):
        if isinstance(row["power_limit_w"], (int, float)):
            row["power_limit_w"] = f"{row['power_limit_w']:.0f} W"
        lines.append(", ".join(f"{labels[name]}{row[name]}" for name in PROVENANCE))
    return lines


def geometric_mean(values) -> float:
    """Return the geometric mean of positive numbers."""
    values = list(values)
    return math.exp(sum(math.log(value) for value in values) / len(values))


def summary(rows, baseline: str = "jfa_baseline") -> list[dict]:
    """Return one line for each suite, direction, scope and peer: shapes, geometric mean TFLOPS, ratio.

    ``ratio`` is the geometric mean of peer over baseline on the shapes that both ran, nan if there is none.
    """
    shape = ["M", "N", "density", "B", "Hq", "Hkv", "D", "causal", "window", "dtype"]
    shape = [column for column in shape if column in rows]
    lines = []
    for key, group in rows.groupby(KEYS, sort=False):
        wide = group.pivot_table(index=shape, columns="peer", values="tflops", dropna=False, observed=True)
        wide = wide.dropna(how="all")
        for peer in wide.columns:
            ran = wide[peer].dropna()
            both = wide[[peer, baseline]].dropna() if baseline in wide else wide.iloc[:0]
            ratio = geometric_mean(both.iloc[:, 0] / both.iloc[:, -1]) if len(both) else math.nan
            line = {"peer": peer, "shapes": len(ran), "tflops": geometric_mean(ran), "ratio": ratio}
            lines.append(dict(zip(KEYS, key, strict=True)) | line)
    return lines


def markdown(titles, lines) -> str:
    """Return a Markdown table of texts, a line each, without a last line break."""
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (titles, *lines))
    return "\n".join([first, "|---" * len(titles) + "|", *rest])


def table(rows) -> str:
    """Return the README's text on the measurements: a Markdown table and its provenance."""
    if rows.empty:
        return NOTHING
    titles = [
        "suite",
        "direction",
        "scope",
        "what ran",
        "shapes",
        "TFLOPS, geometric mean",
        "over the baseline",
    ]
    lines = []
    for line in summary(rows):
        ratio = "" if math.isnan(line["ratio"]) else f"{line['ratio']:.2f}"
        keys = [str(line[name]) for name in KEYS]
        lines.append([*keys, line["peer"], str(line["shapes"]), f"{line['tflops']:.0f}", ratio])
    where = "; ".join(provenance_lines(rows))
    return (
        f"{markdown(titles, lines)}\n\nFLOPs of real lengths, padding never counted. Measured on {where}.\n"
    )


def readme_text() -> str:
    """Return what stands between README's marks: the results, or before they exist the baseline's table."""
    from jfa.lab import readme, results

    return readme.text(results.load(results.RESULTS)) or table(measured("02_"))


def block(text: str) -> str:
    """Return the text between the marks of a README; ValueError if they are not there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError("README.md: expected the marks of the measured block once each")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def rewrite(path: Path = README, rows=None) -> str:
    """Write the table into the README between its marks; return what changed, in a few words.

    Raises ValueError where nothing is recorded: a table that is there is not replaced by none.
    """
    text = path.read_text()
    table_text = readme_text() if rows is None else table(rows)
    if rows is None and table_text == NOTHING:
        raise ValueError(f"{path.name}: left as it is, because figures/ has no recordings")
    new = text.replace(BEGIN + block(text), BEGIN + table_text)
    path.write_text(new)
    return f"{path.name}: {'nothing to change' if new == text else 'the measured table was rewritten'}"


def describe(rows) -> str:
    """Return a few lines for a notebook: what was recorded where, or that nothing was."""
    if rows.empty:
        return "not measured: no recording of a GPU is in figures/, so this notebook claims no speed"
    lines = [f"recorded on {where}" for where in provenance_lines(rows)]
    for line in summary(rows):
        ratio = "" if math.isnan(line["ratio"]) else f", {line['ratio']:.2f} of the baseline"
        what = f"{line['suite']} {line['direction']} {line['scope']}: {line['peer']}"
        lines.append(f"{what} {line['tflops']:.0f} TFLOPS over {line['shapes']} shapes{ratio}")
    return "\n".join(lines)


def live(quick: bool = False, peers: tuple[str, ...] = ("jfa_baseline", "torch_varlen")) -> list[dict]:
    """Measure peers on one jagged shape on the current GPU, as the benchmark does; return measured rows."""
    import torch

    with warnings.catch_warnings(), torch.cuda.stream(torch.cuda.Stream()):  # as in `jfa.lab.bench`
        warnings.filterwarnings("ignore", module=r"cutlass\.")  # FlashAttention-4's compiler names its files
        return measured_in_turn(quick, peers)


def measured_in_turn(quick: bool, peers: tuple[str, ...], device: str = "cuda") -> list[dict]:
    """The rows of `live`: whole calls, checked against float32, one pass after the other."""
    from jfa.lab import bench, cases, measure
    from jfa.lab import peers as known
    from jfa.lab.results import DIRECTIONS

    case = cases.Case("jagged", 128, 256 if quick else 1024, 0.5, B=64 if quick else 768)
    prepared = bench.Prepared(case, device)
    for name in peers:
        prepared.add(name, known.PEERS[name], DIRECTIONS, "call")
    missing = {name: reason for (name, *_), reason in prepared.reasons.items()}
    rows = [{"impl": name, "error": reason, **case.columns()} for name, reason in missing.items()]
    options = {"graph": device != "cpu", "host_clock": device == "cpu", "sample_ms": 8.0}
    options["settle_ms"] = 0.0 if quick else measure.SETTLE_MS
    for direction in DIRECTIONS:
        functions = {key: fn for key, fn in prepared.functions.items() if key[1] == direction}
        rows += map(prepared.row, bench.in_turn(functions, 3 if quick else 9, **options))
    return rows


def show(row: dict) -> str:
    """A row of `live` as a line: milliseconds with their spread, TFLOPS, error over what is allowed."""
    if row.get("error"):
        return f"{row['impl']}: did not run: {row['error']}"
    spread = f"{row['ms_p20']:.3f} to {row['ms_p80']:.3f}"
    took = f"{row['ms_p50']:.3f} ms ({spread}), {row['tflops']:.0f} TFLOPS"
    took += f", {100 * row['budget_share']:.0f} % of the error budget" if row.get("budget_share") else ""
    return f"{row['direction']:<8} {row['impl']:<14} {took}"


def live_text(quick: bool = False, peers: tuple[str, ...] = ("jfa_baseline", "torch_varlen")) -> str:
    """Return what `live` measured as text, with the provenance."""
    return told_live(live(quick, peers), show)


def told_live(rows, shown) -> str:
    """Return rows that were measured just now as text: a line ``shown(row)`` each, then where."""
    import pandas

    rows = list(rows)
    where = provenance_lines(pandas.DataFrame([row for row in rows if not row.get("error")]))
    return "\n".join(["measured live", *map(shown, rows), *(f"measured on {line}" for line in where)])
