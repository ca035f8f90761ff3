"""Every figure of the course: its data in figures/NN_name.csv, its picture beside it, both made by code.

    python -m jfa.lab.figures [NAME ...]   redraw pictures from their CSVs (`make figures`)
    python -m jfa.lab.figures --data       first compute anew the CSVs that need no GPU
    python -m jfa.lab.figures --readme     rewrite the table of measurements in README.md

A picture remembers a digest of the data it was drawn from, so a test sees when the two part.
"""

import argparse
import csv
import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "figures"
MISSING = (AttributeError, IndexError, KeyError, TypeError)  # a column or a row that a drawing counts on


@dataclass(frozen=True)
class Figure:
    """A figure: the function that draws its rows, and the one that computes them (None: recorded on a GPU).

    Both are named "module:function", so that reading the registry imports neither matplotlib nor Triton.
    """

    draw: str
    data: str | None = None

    def drawing(self) -> Callable:
        """Return the drawing function: rows (a pandas DataFrame) -> matplotlib Figure."""
        return _resolve(self.draw)

    def compute(self) -> list[dict]:
        """Return the rows, computed anew; TypeError for a figure whose rows come from a GPU."""
        if self.data is None:
            raise TypeError("the rows of this figure are recorded on a GPU, not computed")
        return _resolve(self.data)()


REGISTRY = {
    "00_waste": Figure("drawings:where_work_goes", "figure_data:where_work_goes"),
    "01_histories": Figure("drawings:histories", "figure_data:histories"),
    "01_packing": Figure("drawings:packing", "figure_data:packing"),
    "01_padding": Figure("drawings:padding", "figure_data:padding"),
    "02_instructions": Figure("drawings:instructions", "figure_data:instructions"),
    "02_turns": Figure("drawings:turns", "figure_data:turns"),
    "02_baseline": Figure("drawings:baseline_speed"),
    "03_memory": Figure("drawings_roles:memory_map", "memory:first_map"),
    "03_final": Figure("drawings_roles:final_map", "memory:last_map"),
    "03_owners": Figure("drawings_roles:owners", "memory:owners"),
    "03_timeline": Figure("drawings_roles:timeline", "pipeline:timeline_rows"),
    "03_mutation": Figure("drawings_roles:mutation"),
    "04_forward": Figure("drawings_deals:forward_map", "dealing:forward_map"),
    "04_backward": Figure("drawings_deals:backward_map", "dealing:backward_map"),
    "04_balance": Figure("drawings_deals:balance", "dealing:balance_rows"),
    "04_empty": Figure("drawings_deals:empty", "dealing:empty_rows"),
    "04_steps": Figure("drawings_deals:steps"),
    "05_reduction": Figure("drawings_staging:reduction"),
    "05_timeline": Figure("drawings_staging:timeline", "staging:timeline_rows"),
    "05_rate": Figure("drawings_staging:rate", "staging:rate_rows"),
    "05_steps": Figure("drawings_staging:steps"),
    "06_timeline": Figure("drawings_staging:release_timeline", "staging:release_timeline_rows"),
    "06_released": Figure("drawings_staging:released", "staging:released_rows"),
    "07_masks": Figure("drawings_edges:masks", "edges:map_rows"),
    "07_registers": Figure("drawings_edges:registers", "edges:loop_rows"),
    "07_share": Figure("drawings_edges:share", "edges:share_rows"),
    "07_gain": Figure("drawings_edges:gain", "edges:gain_rows"),
    "08_exchange": Figure("drawings_pair:exchange", "pair:exchange_rows"),
    "08_traffic": Figure("drawings_pair:traffic", "pair:traffic_rows"),
    "08_order": Figure("drawings_pair:order", "pair:order_rows"),
    "08_steps": Figure("drawings_pair:steps"),
    "10_counters": Figure("drawings_profile:counters"),
    "10_ablation": Figure("drawings_profile:ablation_bars"),
    "10_stamps": Figure("drawings_stamps:clocks"),
    "10_rounds": Figure("drawings_profile:rounds"),
    "10_neighbours": Figure("drawings_clocks:neighbour_curves"),
    "10_clocks": Figure("drawings_clocks:clocks"),
    "09_onchip": Figure("drawings_onchip:onchip_bars", "onchip:rows"),
    "09_results": Figure("drawings_results:ratios"),
    "09_roofline": Figure("drawings_results:roofline"),
    "09_ladder": Figure("drawings_results:ladder"),
    "09_dense": Figure("drawings_results:dense"),
    "09_spread": Figure("drawings_results:spread"),
}


def _resolve(name: str) -> Callable:
    import importlib

    module, function = name.split(":")
    return getattr(importlib.import_module(f"jfa.lab.{module}"), function)


def path_of(name: str, suffix: str = ".csv") -> Path:
    """Return where the data (".csv") or the picture (".svg") of a figure lies."""
    return FOLDER / f"{name}{suffix}"


def with_data() -> list[str]:
    """Return the figures of the registry that have data, in order."""
    return [name for name in REGISTRY if path_of(name).exists()]


def read(name: str):
    """Return the rows of a figure as a pandas DataFrame."""
    import pandas

    return pandas.read_csv(path_of(name), keep_default_na=False, na_values=["nan"])


def write(name: str, rows: list[dict]) -> Path:
    """Write the rows of a figure to its CSV; return the path."""
    FOLDER.mkdir(exist_ok=True)
    with open(path_of(name), "w", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path_of(name)


def draw(name: str, rows=None):
    """Return a figure drawn from its CSV, or from rows (a list of dicts or a DataFrame) of such columns."""
    import pandas

    from jfa.lab import style

    rows = read(name) if rows is None else pandas.DataFrame(rows)
    with style.styled():
        return REGISTRY[name].drawing()(rows)


def digest(name: str) -> str:
    """Return the digest that the picture of a figure has to carry."""
    return hashlib.sha256(path_of(name).read_bytes()).hexdigest()[:16]


def drawn_from(svg: str) -> str | None:
    """Return the digest of the data that a picture says it was drawn from, or None."""
    found = re.search(r"drawn from ([0-9a-f]{16})", svg)
    return found.group(1) if found else None


def save(name: str, folder: Path | None = None) -> Path:
    """Draw a figure from its CSV and write NN_name.svg, the same bytes for the same data; return the path.

    It goes to ``folder``, or beside its CSV.
    """
    import matplotlib.pyplot as plt

    from jfa.lab import style

    path = (folder or FOLDER) / f"{name}.svg"
    said = {"Date": None, "Description": f"{name}.csv, drawn from {digest(name)}"}
    with style.styled(), plt.rc_context({"svg.hashsalt": name}):
        draw(name).savefig(path, metadata=said)
    return path


def main(arguments: list[str] | None = None) -> int:
    """Run the command line above; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.figures", description="Redraw the figures.")
    parser.add_argument("names", nargs="*", help="figures, all that have data if none is given")
    parser.add_argument("--data", action="store_true", help="compute anew the data that needs no GPU")
    parser.add_argument("--readme", action="store_true", help="rewrite the table in README.md, draw nothing")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(REGISTRY)):
        parser.error(f"no figure {', '.join(unknown)}; there are {', '.join(REGISTRY)}")
    if options.readme and options.names:
        parser.error("--readme draws nothing: leave out the names")
    if options.readme:
        from jfa.lab import recorded as recordings

        try:
            print(recordings.rewrite())
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return 0
    import matplotlib

    matplotlib.use("agg")
    if options.data:
        for name in options.names or REGISTRY:
            if REGISTRY[name].data is not None:
                write(name, REGISTRY[name].compute())
    for name in options.names or with_data():
        try:
            print(save(name).relative_to(ROOT), flush=True)
        except (OSError, ValueError) as error:
            parser.error(f"{name}: {error}")
        except MISSING as error:
            parser.error(f"{path_of(name)}: not the rows of this figure ({type(error).__name__}: {error})")
    if missing := [name for name in REGISTRY if not path_of(name).exists()]:
        print(f"no data yet for {', '.join(missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
