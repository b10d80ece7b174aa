"""Pictures of one run, drawn from the files of its run directory."""

import io
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; a run has no window
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from reprune.rundir import RunDir

WIDTH, HEIGHT = 7.0, 4.2  # inches


def draw_all(rundir: RunDir) -> list[Path]:
    """Draw plots/*.png from blocks.jsonl: errors by block, training curves, and where the time went.

    Returns:
        The files, in the order a report shows them.
    """
    blocks = rundir.read_blocks()
    pictures = {"errors_by_block": _errors, "seconds_by_block": _seconds}
    if any(block["fits"] for block in blocks):
        pictures["training_curves"] = _curves
    files = []
    for name, paint in pictures.items():
        figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
        paint(axes, blocks)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=150, format="png")
        plt.close(figure)
        path = rundir.path / "plots" / f"{name}.png"
        rundir.write_bytes(f"plots/{name}.png", buffer.getvalue())
        files.append(path)
    return files


def _errors(axes: Axes, blocks: list[dict[str, Any]]) -> None:
    """Relative error after each block, by corpus; dotted is before reconstruction."""
    index = [block["block"] for block in blocks]
    trained = any(block["fits"] for block in blocks)
    for number, corpus in enumerate(blocks[0]["after"]):
        label = "calibration" if corpus == "calib" else f"held out: {corpus}"
        color = f"C{number}"
        axes.plot(index, [block["after"][corpus]["relative"] for block in blocks], ".-", color=color, label=label)
        if trained:
            axes.plot(index, [block["before"][corpus]["relative"] for block in blocks], ":", color=color, alpha=0.7)
    if trained:
        axes.plot([], [], "k:", alpha=0.7, label="before reconstruction of the block")
    axes.set(xlabel="block", ylabel="relative error to the dense model", yscale="log", title="Error by block")
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def _curves(axes: Axes, blocks: list[dict[str, Any]]) -> None:
    """Training loss over its median, a line a window, coloured by depth; batches with massive activations stand out."""
    shade = plt.get_cmap("viridis")
    for block in blocks:
        for fit in block["fits"][:1]:
            steps, losses = zip(*fit["curve"], strict=True)
            color = shade(block["block"] / max(1, len(blocks) - 1))
            middle = statistics.median(losses)
            axes.plot([step / fit["steps"] for step in steps], [loss / middle for loss in losses], color=color, lw=1)
    depth = plt.Normalize(0, max(1, len(blocks) - 1))
    axes.figure.colorbar(plt.cm.ScalarMappable(depth, shade), ax=axes, label="block")
    axes.set(
        xlabel="fraction of the steps",
        ylabel="training loss over its median",
        yscale="log",
        title="Training curves",
    )


def _seconds(axes: Axes, blocks: list[dict[str, Any]]) -> None:
    """Seconds by stage, stacked."""
    stages = list(dict.fromkeys(stage for block in blocks for stage in block["seconds"]))
    index = [block["block"] for block in blocks]
    rows = [[block["seconds"].get(stage, 0.0) for block in blocks] for stage in stages]
    axes.stackplot(index, rows, labels=stages, alpha=0.85, step="mid" if len(index) > 1 else None)
    axes.set(xlabel="block", ylabel="seconds", title="Time by block and stage")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
