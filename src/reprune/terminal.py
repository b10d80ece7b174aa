"""What a run says while it works: lines for people on the terminal and in run.log, progress bars on a terminal only."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from reprune.rundir import explained
from reprune.walk import BlockRecord, sparsity

log = logging.getLogger("reprune")
WIDTH = 22  # of a column of errors


class _ToFile(logging.FileHandler):
    """Writes to a file, and stops the run where that fails: a log with holes would not be one."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            log.removeHandler(self)  # what is said of it must not end up here again
            with explained(Path(self.baseFilename)):
                raise error
        super().handleError(record)


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send this package's log to the terminal, and with times to a file."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        to_file = _ToFile(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    to_terminal = logging.StreamHandler(sys.stdout)
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [to_terminal, to_file]
    try:
        yield
    finally:
        log.handlers = []
        with explained(path):
            to_file.close()


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar while something long goes on; yields what to call after each step, with the number of steps if not 1.

    Silent when not on a terminal.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda steps=1: bar.advance(task, steps)


def block_header(corpora: list[str], changes: bool) -> str:
    """Head the lines of `block_line`."""
    names = "".join(f"{name:>{WIDTH}}" for name in corpora)
    what = "after pruning > after reconstruction" if changes else "after pruning"
    return (
        f"\nRelative error of the hidden states to the dense model's, {what}:\n{'block':>5}{names}  sparsity  seconds"
    )


def block_line(record: BlockRecord, corpora: list[str], changes: bool) -> str:
    """Say in one line what happened to a block."""
    cells = []
    for name in corpora:
        before, after = record.before[name].relative, record.after[name].relative
        cells.append(f"{before:.5f} > {after:.5f}" if changes else f"{after:.5f}")
    row = "".join(f"{cell:>{WIDTH}}" for cell in cells)
    return f"{record.block:>5}{row}{sparsity([record]):>10.4f}{sum(record.seconds.values()):>9.1f}"


def summary(metrics: dict[str, float], corpora: list[str]) -> str:
    """Lay out perplexity and divergence as a table: dense against pruned, a row a corpus."""
    rows = []
    for name in corpora:
        dense, pruned = metrics[f"ppl_dense/{name}"], metrics[f"ppl/{name}"]
        rows.append([
            name,
            f"{dense:.2f} ± {metrics[f'ppl_dense_stderr/{name}']:.2f}",
            f"{pruned:.2f} ± {metrics[f'ppl_stderr/{name}']:.2f}",
            f"{pruned / dense:.3f}",
            f"{metrics[f'kl/{name}']:.3f} ± {metrics[f'kl_stderr/{name}']:.3f}",
            f"{metrics[f'agreement/{name}']:.1%}",
        ])  # fmt: skip
    return table(["test text", "dense ppl", "pruned ppl", "ratio", "KL(dense||pruned)", "same top-1"], rows)


def table(titles: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Lay out rows under titles; the first `left` columns are words, the others numbers."""
    grid = Table(show_edge=False, pad_edge=False)
    for index, title in enumerate(titles):
        grid.add_column(title, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*map(escape, row))
    console = Console(file=StringIO(), width=110)
    console.print(grid)
    text = console.file
    assert isinstance(text, StringIO)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def size(count: float) -> str:
    """Write a number of bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Write seconds for people."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 6000 else f"{seconds / 3600:.1f} h"
