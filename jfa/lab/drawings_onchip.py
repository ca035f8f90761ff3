"""How the figure of what the last step keeps on chip is drawn (09_onchip)."""

import matplotlib.pyplot as plt

from jfa.lab import onchip, style

# Tensors in the order of the bars, with the kind of operation whose colour they take.
HUES = {
    "Q": "schedule",
    "dQ": "reduce",
    "K": "load",
    "V": "other",
    "O": "store",
    "dO": "softmax",
    "dK": "store",
    "dV": "correction",
}


def onchip_bars(rows):
    """Stacked bars: KiB for a block of scores by tensor, the step before the last and the last."""
    bars = [(way, step) for way in ("forward", "backward") for step in onchip.STEPS]
    table = rows.groupby(["direction", "step", "tensor"], sort=False)["kib"].sum()
    total = table.groupby(level=["direction", "step"]).sum()
    figure, axes = plt.subplots(figsize=(7.2, 3.5))
    for place, (way, step) in enumerate(bars):
        left = 0.0
        for tensor, hue in HUES.items():
            size = table.get((way, step, tensor), 0.0)
            if not size:
                continue
            color = style.color_of(hue)
            axes.barh(place, size, left=left, height=0.66, color=color, edgecolor="white", linewidth=0.8)
            if size > 20:
                ink = style.text_color(color)
                axes.text(left + size / 2, place, tensor, ha="center", va="center", fontsize=8.5, color=ink)
            left += size
        axes.text(left + 4, place, f"{total[way, step]:.0f}", va="center", fontsize=9)
    names = [f"{way}: {style.label_of(step)}" for way, step in bars]
    axes.set_yticks(range(len(bars)), names, fontsize=9)
    axes.set(ylim=(len(bars) - 0.5, -0.5), xlim=(0, 1.1 * total.max()))
    axes.set_xlabel("KiB that TMA moves for 128 x 128 useful scores")
    axes.tick_params(axis="y", length=0)
    size = onchip.left(rows.to_dict("records"))
    parts = [100 * (1 - size["kept"] / size["before"]), 100 * (size["kept"] - size["last"]) / size["before"]]
    title = f"Backward, Q and dQ on chip save {parts[0]:.0f} %, smaller tiles and a kept dO {parts[1]:.0f} %"
    note = (
        f"{onchip.SEQUENCES} real histories, {onchip.QUERIES} shared queries, three CTAs · thin parts with "
        "no name are Q and dQ · counted in the emulator's trace, no GPU involved"
    )
    return style.finish(figure, title, note)
