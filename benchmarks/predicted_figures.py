"""The figure of predicted numbers; `figures.py` writes it."""

from __future__ import annotations

from measured_figures import results

from ring_dilated_attention.draw import Sheet, Style, add_grid, dress

NAMES = {
    "LongNet": "LongNet",
    "dense causal": "dense, causal",
    "crossing": "crossing: (all, 512)",
    "LongNet + (all, 65536), causal": "LongNet + (all, 65536)",
}
"""Cases of benchmarks/many_hosts.py, and what the figure calls them."""


def many_hosts(style: Style) -> Sheet:
    """How much of one GPU's speed each of up to 4,096 would have, by the cost model."""
    from matplotlib.ticker import FixedLocator, NullLocator

    found = results("many_hosts.json")["predicted"]
    gpus = [x["gpus"] for x in found["LongNet"]]
    sheet = Sheet(style, 8.8, 4.9)
    sheet.text(0.15, 0.27, "Speed per GPU, predicted", fontsize=11.5, fontweight="bold")
    sheet.text(
        0.15, 0.5, "262,144 tokens per GPU, 8 GPUs per host, forward and backward; a model, not a "
        "measurement", color=style.muted,
    )  # fmt: skip
    axes = sheet.axes(0.75, 0.85, 5.6, 3.1)
    dress(axes, style)
    add_grid(axes, style)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(gpus))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{count:,}" for count in gpus])
    axes.set_ylim(0, 107)
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.set_xlabel("GPUs")
    colors = style.branch_colors(len(NAMES))
    for number, (case, name) in enumerate(NAMES.items()):
        for kind, line in (("efficiency", "-"), ("device_efficiency", (0, (2, 1.5)))):
            shares = [100 * x[kind] for x in found[case]]
            axes.plot(gpus, shares, color=colors[number], linestyle=line, linewidth=1.8)
        sheet.key(6.6, 1.2 + 0.3 * number, [colors[number]], [name])
    sheet.note(
        "Solid: as it is; a step with rows takes the CPU 0.6 ms in forward and 0.8 ms in backward. "
        "Dashed: if the CPU took no time.", 1,
    )  # fmt: skip
    sheet.note("Constants fitted to one and two H200; 350 GB/s inside a host, 45 between hosts.")
    return sheet
