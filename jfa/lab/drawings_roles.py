"""How the figures of notebook 03 are drawn: memory map, timeline, owners of tensor memory, mutation score."""

import matplotlib.pyplot as plt

from jfa.lab import memory, pictures, pipeline, style

PREDICTED = "predicted: the emulator's trace of one CTA charged with an H200's rates, not measured"
LANES = {"baseline": ("copies", "all 8 warps", "tensor cores"),
         "warp_specialized": ("copies", "group 0", "group 1", "tensor cores")}  # fmt: skip


def memory_map(rows, title="The first steps fill both memories, and a quarter of tensor memory twice"):
    """Shared memory of both targets and tensor memory, by who fills it (03_memory)."""
    memories = {}
    for row in rows.to_dict("records"):
        found = memories.setdefault(row["memory"], {"size": row["of"], "regions": []})
        # Too narrow to show a colour, barriers are named and stay out of the key.
        kind = None if row["kind"] == "schedule" else row["kind"]
        found["regions"].append({**row, "kind": kind})
    note = (
        "sizes from the compiler's TTGIR, drawn in the order of allocation · "
        "colour: the role that fills it · second line: how long a content lives"
    )
    return pictures.memory_map(memories, title, note=note)


def final_map(rows):
    """The same of the last forward steps (03_final)."""
    return memory_map(
        rows, "The last steps: O gets a tile of its own on an H200, K and V a fifth slot on a B200"
    )


def timeline(rows):
    """One CTA, two query tiles: baseline above, warp-specialized below, on one time axis (03_timeline)."""
    events, lanes, busy = [], [], {}
    for kernel, names in LANES.items():
        spans = pipeline.spans_of(rows, kernel)
        busy[kernel] = pipeline.busy(spans)
        prefix = "turns" if kernel == "baseline" else "roles"
        lanes += [f"{prefix}: {name}" for name in names]
        for span in spans:
            label = "" if span["kind"] == "softmax" and span["end"] - span["start"] < 400 else span["label"]
            events.append({**span, "lane": f"{prefix}: {span['lane']}", "label": label})
    turns, roles = (f"{100 * busy[kernel]:.0f} %" for kernel in LANES)
    title = f"Predicted: roles keep the tensor cores busy {roles} of the time, turns {turns}"
    note = f"{PREDICTED} · two tiles of 128 queries and {pipeline.BLOCKS} key tiles each, K and V from L2"
    return pictures.timeline(events, title, lanes=lanes, note=note)


def owners(rows):
    """Which role works on which columns of tensor memory, in the emulator's order (03_owners)."""
    title = "Columns of tensor memory go from role to role, and never have two owners"
    note = (
        "one tile of the Blackwell forward kernel in the emulator: the order of operations, no time · "
        "S scores, P weights, O accumulator, stat row sums and maxima"
    )
    figure = pictures.timeline(rows.to_dict("records"), title, lanes=list(memory.REGIONS), note=note)
    figure.axes[0].set_xlabel("operations of the run, in the emulator's order")
    return figure


def mutation(rows):
    """Bars: share of the wrong versions of each kernel that the emulator notices (03_mutation)."""
    ran = rows[rows["verdict"] != "not run"]
    seen = ran["verdict"].isin(["detected", "warned"])
    table = ran.assign(seen=seen, why=~seen & (ran["explanation"] != "")).groupby("kernel", sort=False)
    counts = table.agg(ran=("seen", "size"), seen=("seen", "sum"), why=("why", "sum")).reset_index()
    figure, axes = plt.subplots(figsize=(7.2, 0.34 * len(counts) + 1.6))
    share = counts["seen"] / counts["ran"]
    axes.barh(counts["kernel"], share, color=style.color_of("mma"), label="noticed")
    axes.barh(
        counts["kernel"],
        counts["why"] / counts["ran"],
        left=share,
        color=style.KINDS["wait"],
        label="survived, explained",
    )
    for place, row in enumerate(counts.itertuples()):
        axes.text(0.01, place, f"{row.seen} of {row.ran}", va="center", color="white", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the mutants")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    title = f"The emulator notices {counts['seen'].sum()} of {counts['ran'].sum()} broken synchronizations"
    return style.finish(
        figure,
        title,
        "a mutant has one synchronization statement wrong; 03_mutation.csv explains each survivor · "
        "fa_* and gemm_* are TLX's own tutorials · recorded by python -m jfa.emulator.mutate",
    )
