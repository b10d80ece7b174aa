"""Runs side by side: `python -m reprune.report multirun/default/*/* --to FOLDER` writes a table and figures.

Reads finished run directories and nothing else; runs may have different evaluations.
"""

import argparse
import csv
import glob
import io
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only
import matplotlib.pyplot as plt
import yaml
from matplotlib.figure import Figure

from reprune.errors import RepruneError
from reprune.rundir import RunDir

CHOICES = ("model", "calib", "sparsity", "pruner", "recon")
DRAWS = ("calib.draw", "seed")  # settings that say which text was drawn, and nothing else
MARKERS = "os^Dv<>p*h"


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        path: its directory.
        choices: config group -> option.
        settings: what else its command line said.
        metrics: as in metrics.json.
    """

    path: Path
    choices: dict[str, str]
    settings: dict[str, str]
    metrics: dict[str, float]

    @property
    def blocks(self) -> int:
        """How many blocks its model has."""
        return 1 + max(int(key.rpartition("/")[2]) for key in self.metrics if key.startswith("error/calib/"))


def collect(paths: Iterable[str]) -> tuple[list[Run], list[Path]]:
    """Read every run directory that paths or patterns name.

    Returns:
        The finished runs, and the directories of runs that did not finish.

    Raises:
        RepruneError: nothing that is named is a run directory.
    """
    folders = sorted({Path(found) for path in paths for found in glob.glob(path)})
    folders = [folder for folder in folders if (folder / "config.resolved.yaml").is_file()]
    if not folders:
        raise RepruneError(f"{' '.join(paths)}: there is no run directory (a folder with config.resolved.yaml).")
    runs, unfinished = [], []
    for folder in folders:
        metrics = RunDir(folder).read_json("metrics.json")
        if metrics is None:
            unfinished.append(folder)
            continue
        hydra = folder / ".hydra"
        chosen = yaml.safe_load((hydra / "hydra.yaml").read_text(encoding="utf-8"))["hydra"]["runtime"]["choices"]
        typed = dict(
            item.split("=", 1) for item in yaml.safe_load((hydra / "overrides.yaml").read_text()) if "=" in item
        )
        choices = {group: str(chosen[group]) for group in CHOICES}
        settings = {key: value for key, value in typed.items() if key not in choices}
        runs.append(Run(folder, choices, settings, metrics))
    return runs, unfinished


def table(runs: list[Run]) -> list[dict[str, Any]]:
    """Make a row a run: choices, settings, errors of the last block, everything that evaluation found, seconds."""
    rows = []
    for run in runs:
        last = f"/{run.blocks - 1}"
        row: dict[str, Any] = {"run": run.path.name, **run.choices, **run.settings}
        for key, value in run.metrics.items():
            per_block = key.partition("/")[0] in ("error", "mse", "mse_typical", "token_share")
            if not per_block:
                row[key] = value
            elif key.endswith(last):
                row[key.removesuffix(last) + "/last"] = value
        rows.append(row)
    return rows


def over_draws(runs: list[Run]) -> list[dict[str, Any]]:
    """Make a row for each cell that was run on several draws or seeds: mean and standard deviation of every number.

    Returns:
        `<name>` (mean) and `<name>_sd` (of a single draw, n - 1), with `runs` counted; empty if no cell has two runs.
    """
    cells: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = defaultdict(list)
    for run, row in zip(runs, table(runs), strict=True):
        same = {key: value for key, value in {**run.choices, **run.settings}.items() if key not in DRAWS}
        cells[tuple(sorted(same.items()))].append(row)
    rows = []
    for cell, members in cells.items():
        if len(members) < 2:
            continue
        row = {"runs": len(members), **dict(cell)}
        for name, value in members[0].items():
            values = [member[name] for member in members if name in member]
            if isinstance(value, int | float) and len(values) == len(members):
                row |= {name: statistics.mean(values), f"{name}_sd": statistics.stdev(values)}
        rows.append(row)
    return rows


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Write rows as CSV; a run without a column leaves it empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def error_against_perplexity(runs: list[Run]) -> Figure:
    """Draw a point a run: held-out error of the last block against perplexity, a panel a test corpus."""
    corpora = sorted({key.partition("/")[2] for run in runs for key in run.metrics if key.startswith("kl/")})
    figure, panels = plt.subplots(
        1, max(1, len(corpora)), figsize=(5.6 * max(1, len(corpora)), 4.4), squeeze=False, layout="constrained"
    )
    colors, markers = _styles(runs)
    for axes, corpus in zip(panels[0], corpora, strict=False):
        for run in runs:
            error = run.metrics.get(f"error/{corpus}/{run.blocks - 1}")
            if error is None or f"ppl/{corpus}" not in run.metrics:
                continue
            axes.errorbar(
                error, run.metrics[f"ppl/{corpus}"], run.metrics[f"ppl_stderr/{corpus}"], alpha=0.9,
                color=colors[run.choices["recon"]], marker=markers[run.choices["pruner"]], linestyle="", elinewidth=0.7,
            )  # fmt: skip
            axes.axhline(run.metrics[f"ppl_dense/{corpus}"], color="grey", lw=0.8, ls=":")
        axes.set(
            xlabel=f"relative error of the last block, held out: {corpus}",
            ylabel=f"perplexity, {corpus}",
            xscale="log",
            yscale="log",
        )
    _legend(figure, colors, markers)
    return figure


def calibration_against_held_out(runs: list[Run]) -> Figure:
    """Draw a point a run and held-out corpus: error of the last block on calibration text against held-out text."""
    corpora = sorted({key.split("/")[1] for run in runs for key in run.metrics if key.startswith("error/")} - {"calib"})
    figure, panels = plt.subplots(
        1, max(1, len(corpora)), figsize=(5.6 * max(1, len(corpora)), 4.4), squeeze=False, layout="constrained"
    )
    colors, markers = _styles(runs)
    for axes, corpus in zip(panels[0], corpora, strict=False):
        for run in runs:
            last = run.blocks - 1
            if f"error/{corpus}/{last}" in run.metrics:
                axes.plot(
                    run.metrics[f"error/calib/{last}"], run.metrics[f"error/{corpus}/{last}"],
                    color=colors[run.choices["recon"]], marker=markers[run.choices["pruner"]], linestyle="",
                )  # fmt: skip
        axes.set(xscale="log", yscale="log")
        ends = [*axes.get_xlim(), *axes.get_ylim()]  # after the scales are set: they move the limits
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="grey", lw=0.8, ls=":")
        axes.set(
            xlabel="relative error of the last block, calibration",
            ylabel=f"held out: {corpus}",
            xscale="log",
            yscale="log",
        )
    _legend(figure, colors, markers)
    return figure


def _styles(runs: list[Run]) -> tuple[dict[str, str], dict[str, str]]:
    recons = list(dict.fromkeys(run.choices["recon"] for run in runs))
    pruners = list(dict.fromkeys(run.choices["pruner"] for run in runs))
    return (
        {name: f"C{number % 10}" for number, name in enumerate(recons)},
        {name: MARKERS[number % len(MARKERS)] for number, name in enumerate(pruners)},
    )


def _legend(figure: Figure, colors: dict[str, str], markers: dict[str, str]) -> None:
    handles = [plt.Line2D([], [], color=color, marker="o", linestyle="", label=name) for name, color in colors.items()]
    handles += [plt.Line2D([], [], color="k", marker=mark, linestyle="", label=name) for name, mark in markers.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def main() -> None:
    """Read the command line and write study.csv and the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m reprune.report", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("paths", nargs="+", help="run directories or patterns")
    parser.add_argument("--to", type=Path, default=Path(), help="the folder to write to")
    args = parser.parse_args()
    try:
        runs, unfinished = collect(args.paths)
        if not runs:
            raise RepruneError(f"None of the {len(unfinished)} runs has finished.")
    except RepruneError as error:
        sys.exit(str(error))
    folder = RunDir(args.to)
    folder.write_text("study.csv", as_csv(table(runs)))
    draws = over_draws(runs)
    if draws:
        folder.write_text("draws.csv", as_csv(draws))
    for name, paint in (
        ("error_perplexity", error_against_perplexity),
        ("calib_heldout", calibration_against_held_out),
    ):
        figure = paint(runs)
        content = io.BytesIO()
        figure.savefig(content, dpi=120, format="png")
        plt.close(figure)
        folder.write_bytes(f"{name}.png", content.getvalue())
    print(f"{len(runs)} runs in {args.to / 'study.csv'}, with two figures beside it.")
    if draws:
        print(f"{len(draws)} cells with several draws in {args.to / 'draws.csv'}, mean and standard deviation:")
        for row in draws:
            numbers = [name for name in row if name.startswith(("ppl/", "error/")) and f"{name}_sd" in row]
            print(f"  {row['pruner']} {row['recon']} {row['calib']}, {row['runs']} runs: ", end="")
            print(", ".join(f"{name} {row[name]:.4g} ± {row[f'{name}_sd']:.2g}" for name in numbers))
    for path in unfinished:
        print(f"not finished: {path}")
