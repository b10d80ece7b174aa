"""Perplexity as the pruning papers report it: the text of a split joined and cut into windows of seq_len tokens.

Source: the loaders and evaluation loops of SparseGPT and Wanda (`get_wikitext2`, `get_ptb`, `get_c4`, `eval_ppl`). The
tokenizer reads the joined text once, so a BOS, if it sets one, stands at the very start and not in front of each
window; every window counts the same, and what does not fill a last window is left out.

With a stride below seq_len windows overlap, and each token is scored once, with at least seq_len - stride tokens before
it but for the first window: a lower number, which published ones are not to be compared with.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reprune.errors import ConfigError, CorpusError, NumericalError
from reprune.eval.ppl import compare, forward, spelled_bytes, stderr
from reprune.evaluation import Measured, Subject
from reprune.rows import rows
from reprune.terminal import table


@dataclass(frozen=True, kw_only=True)
class Published:
    """Settings; each is explained in conf/eval/wikitext2.yaml."""

    name: str
    path: str | None
    dataset: str
    subset: str | None
    data_files: str | None
    split: str
    text_field: str
    join: str
    documents: int | None
    max_windows: int | None
    seq_len: int
    stride: int | None
    batch_size: int
    max_dense: float

    def __post_init__(self) -> None:
        key = f"eval.{self.name}"
        for setting, least in (("seq_len", 2), ("batch_size", 1), ("documents", 1), ("max_windows", 1)):
            value = getattr(self, setting)
            if value is not None and value < least:
                raise ConfigError(f"{key}.{setting}={value}: must be at least {least}.")
        if self.stride is not None and not 1 <= self.stride < self.seq_len:
            raise ConfigError(
                f"{key}.stride={self.stride}: must be at least 1 and below {key}.seq_len={self.seq_len}; null for "
                f"windows that do not overlap, as published."
            )

    @property
    def corpora(self) -> list[str]:
        """No test windows are drawn: the protocol says which text is scored."""
        return []

    @property
    def windows(self) -> int:
        """No test windows are drawn."""
        return 0

    @property
    def label(self) -> str:
        """Name in metrics: a perplexity means nothing without the length of its windows."""
        return f"{self.name}-{self.seq_len}" + ("" if self.stride is None else f"-stride{self.stride}")

    def check(self) -> None:
        """Read the text.

        Raises:
            CorpusError: it is not there, or is not as expected.
        """
        _ = self._text

    def texts(self) -> dict[str, str]:
        """Return the rows that are joined."""
        return {str(number): row for number, row in enumerate(self._joined)}

    def identity(self) -> dict[str, Any]:
        """Depend on the text."""
        return {"text": self._text_sha256}

    def steps(self, subject: Subject) -> int:
        """Count batches."""
        return -(-len(self._places(self._tokens(subject.tokenizer))) // self.batch_size)

    def dense(self, subject: Subject, tick: Callable[[], None]) -> Measured:
        """Score a model.

        Args:
            subject: the model and its tokenizer.
            tick: called after each batch.

        Returns:
            `ppl/<label>` and `ppl_stderr/<label>` (delta method over windows), `bits_per_byte/<label>` and
            `tokens/<label>` scored; the record says of which text.

        Raises:
            NumericalError: the perplexity is above `max_dense` or not finite.
        """
        result = self._measure(subject, tick)
        ppl = result.metrics[f"ppl/{self.label}"]
        if not ppl <= self.max_dense:
            raise NumericalError(
                f"perplexity on {self.label} is {ppl:.4g}, above eval.{self.name}.max_dense={self.max_dense:g}: the "
                f"model, its tokenizer or the text does not fit. Try model.bos=always or model.dtype=float32, or raise "
                f"eval.{self.name}.max_dense."
            )
        return result

    def pruned(self, subject: Subject, dense: Measured, tick: Callable[[], None]) -> Measured:
        """Score the pruned model; returns what `dense` returns."""
        return self._measure(subject, tick)

    def table(self, metrics: dict[str, float]) -> str:
        """Lay out the metrics of a run."""
        dense, pruned = metrics[f"ppl_dense/{self.label}"], metrics.get(f"ppl/{self.label}", math.nan)
        bits = [f"{metrics[f'bits_per_byte{which}/{self.label}']:.4f}" for which in ("_dense", "")]
        row = [self.label, f"{dense:.3f}", f"{pruned:.3f}", f"{pruned / dense:.3f}", " > ".join(bits)]
        return table(["published protocol", "dense ppl", "pruned ppl", "ratio", "bits per byte"], [row])

    def _measure(self, subject: Subject, tick: Callable[[], None]) -> Measured:
        tokens = self._tokens(subject.tokenizer)
        places = self._places(tokens)
        losses: list[Tensor] = []
        for batch in _batched(places, self.batch_size):
            inputs = torch.stack([tokens[start : start + self.seq_len] for start, _ in batch])
            logits, _ = forward(subject.model, inputs)
            for row, target, (_, new) in zip(logits, inputs, batch, strict=True):
                losses.append(compare(row, target)[-new:, 0])
            del logits
            tick()
        each = torch.cat(losses)
        means = torch.stack([piece.mean() for piece in losses])
        # As published: the mean over windows. Windows that overlap score unequal numbers: the mean over tokens.
        loss = (means if self.stride is None else each).mean().item()
        ppl = math.exp(min(loss, 700.0))
        scored = torch.cat([tokens[start + self.seq_len - new : start + self.seq_len] for start, new in places])
        metrics = {
            f"ppl/{self.label}": ppl,
            f"ppl_stderr/{self.label}": ppl * stderr(means),
            f"bits_per_byte/{self.label}": each.sum().item()
            / math.log(2)
            / spelled_bytes(scored[None], subject.tokenizer),
            f"tokens/{self.label}": len(each),
        }
        record = {
            "text": self.path or f"{self.dataset} {self.subset or self.data_files or ''} {self.split}",
            "text_sha256": self._text_sha256,
            "tokens_sha256": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
            "windows": len(places),
            "seq_len": self.seq_len,
            "stride": self.stride,
            "bos": bool(tokens[0] == subject.tokenizer.bos_token_id) and "once, at the start of the text",
        }
        return Measured(metrics, record=record)

    def _places(self, tokens: Tensor) -> list[tuple[int, int]]:
        """Return (start, tokens that are scored) of each window; the last ones of a window are scored."""
        if self.stride is None:
            count = len(tokens) // self.seq_len
            places = [(index * self.seq_len, self.seq_len - 1) for index in range(count)]
        else:
            starts = range(0, len(tokens) - self.seq_len + 1, self.stride)
            places = [(start, self.stride if start else self.seq_len - 1) for start in starts]
        places = places[: self.max_windows]
        if not places:
            raise CorpusError(
                f"eval.{self.name}.seq_len={self.seq_len}: the text has only {len(tokens)} tokens, less than a window."
            )
        return places

    def _tokens(self, tokenizer: Any) -> Tensor:
        return torch.tensor(tokenizer(self._text, verbose=False)["input_ids"])

    @cached_property
    def _joined(self) -> list[str]:
        return list(islice(self._rows(), self.documents))

    @cached_property
    def _text(self) -> str:
        return self.join.join(self._joined)

    @property
    def _text_sha256(self) -> str:
        return hashlib.sha256(self._text.encode()).hexdigest()

    def _rows(self) -> Iterator[str]:
        if self.path is not None:
            yield from _local_rows(Path(self.path).expanduser(), self.text_field, f"eval.{self.name}")
            return
        import datasets

        try:
            loaded = datasets.load_dataset(self.dataset, self.subset, data_files=self.data_files, split=self.split)
        except Exception as error:  # the library raises errors of many kinds where the hub cannot be reached
            reason = " ".join(str(error).split())[:300]
            raise CorpusError(
                f"eval.{self.name}.dataset={self.dataset}: cannot be loaded ({reason}). Give its rows as a local file "
                f"with eval.{self.name}.path=..., .jsonl or .txt."
            ) from error
        yield from loaded[self.text_field]


def _local_rows(path: Path, text_field: str, key: str) -> Iterator[str]:
    """Yield the rows of a file as they are, blank ones too: the protocol joins them all. A .txt file is one row."""
    if not path.is_file():
        raise CorpusError(f"{key}.path={path}: there is no such file (looked from {Path.cwd()}).")
    if path.suffix == ".txt":
        yield path.read_text(encoding="utf-8")
        return
    with path.open("rb") as file:
        yield from rows(file, str(path), text_field)


def _batched(items: list[tuple[int, int]], size: int) -> Iterator[list[tuple[int, int]]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
