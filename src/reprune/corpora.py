"""Every sequence of a run, drawn before it begins: calibration in its parts, held-out text, and test windows.

A document is in one split of its corpus, so none tests what it taught. Where two corpora hold the same text, or one
holds it twice, documents that share a run of it with a calibration document are left out of held-out and test text.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reprune.config import Plan
from reprune.draw import Draw, Split, draw, manifest
from reprune.errors import CorpusError
from reprune.interfaces import Corpus, Generated, Writer
from reprune.overlap import RUN, Runs
from reprune.parts import Part
from reprune.walk import CALIB


@dataclass(frozen=True)
class Texts:
    """What a run reads.

    Attributes:
        calib: the parts of calibration in the order of their rows, and their draws.
        heldout: corpus -> draw of its held-out split.
        tests: evaluation -> corpus -> draw of its test split.
        generated: corpus -> how the model wrote it, of those that it wrote for calibration.
        left_out: use -> documents left out of held-out or test text for what they share with calibration.
        shared: evaluation -> (texts that share a run with calibration, texts), where there are any; they are scored.
    """

    calib: list[tuple[Part, Draw]]
    heldout: dict[str, Draw]
    tests: dict[str, dict[str, Draw]]
    generated: dict[str, dict[str, Any]]
    left_out: dict[str, int]
    shared: dict[str, tuple[int, int]]

    @property
    def streams(self) -> dict[str, Tensor]:
        """Stream -> tokens: `calib`, then the held-out corpora."""
        calib = torch.cat([drawn.tokens for _, drawn in self.calib])
        return {CALIB: calib, **{name: drawn.tokens for name, drawn in self.heldout.items()}}

    def manifest(self) -> dict[str, Any]:
        """Return what calib.json says."""
        parts = [
            {"use": sorted(use.value for use in part.use)}
            | manifest(drawn)
            | ({"generated": self.generated[part.corpus]} if part.corpus in self.generated else {})
            for part, drawn in self.calib
        ]
        return {
            "calib": parts,
            "heldout": {name: manifest(drawn) for name, drawn in self.heldout.items()},
            "eval": {
                key: {name: manifest(drawn) for name, drawn in items.items()} for key, items in self.tests.items()
            },
            "left_out": self.left_out,
            "shared": self.shared,
        }

    def metrics(self) -> dict[str, float]:
        """Return `generated/...`: what was written for calibration; empty if nothing was."""
        return {
            f"generated/{key}": told[key]
            for told in self.generated.values()
            for key in ("candidates", "texts", "tokens", "accept_rate", "seconds")
        }

    def notes(self) -> list[str]:
        """Say what a reader of the results must know."""
        tested = {name for items in self.tests.values() for name in items}
        same = sorted({part.corpus for part, _ in self.calib} & (tested | self.heldout.keys()))
        notes = [
            f"calibration and held-out text are both from {name}, though from other documents: its numbers look better "
            f"than those on text from elsewhere."
            for name in same
        ]
        notes += [
            f"{use}: {some} of the {every} texts that it scores share {RUN} letters or more in a row with calibration: "
            f"it looks better than it is."
            for use, (some, every) in self.shared.items()
        ]
        return notes + [
            f"{use}: left out {number} of its documents, which share {RUN} letters or more in a row with calibration."
            for use, number in self.left_out.items()
        ]


def draw_texts(plan: Plan, writer: Writer) -> Texts:
    """Draw every sequence of a run; text that the model is to write is written first, or comes from the cache.

    Args:
        plan: the run.
        writer: the dense model, which is left as it was.

    Raises:
        CorpusError: a corpus has too little text, or the model wrote too little that can be used.
    """
    generated: dict[str, dict[str, Any]] = {}

    def corpus(name: str, split: Split, count: int, seq_len: int) -> Corpus:
        item = plan.corpora[name]
        if not isinstance(item, Generated):
            return item
        written = item.write(writer, plan.corpora[item.base], split, count, seq_len, plan.draw)
        if split is Split.calib:
            generated[name] = written.manifest
        return written

    def take(
        name: str, source: Corpus, split: Split, count: int, seq_len: int, key: str, exclude: frozenset[str]
    ) -> Draw:
        drawn = (writer.tokenizer, count, seq_len, writer.seed, writer.bos, exclude)
        return draw(source, split, *drawn, name=name, key=key)

    calib = _draw_calib(plan, partial(corpus, split=Split.calib, seq_len=plan.seq_len), take)
    runs = Runs(text for _, drawn in calib for text in drawn.texts.values())
    left_out: dict[str, int] = {}

    def apart(name: str, split: Split, count: int, seq_len: int, key: str) -> Draw:
        """Draw documents that share no text with calibration."""
        source = corpus(name, split, count, seq_len)
        shared: frozenset[str] = frozenset()
        while True:
            try:
                drawn = take(name, source, split, count, seq_len, key, shared)
            except CorpusError as error:
                if shared:
                    raise CorpusError(
                        f"{error} {len(shared)} of its documents were left out: they share {RUN} letters or more in a "
                        f"row with calibration text."
                    ) from error
                raise
            if not (more := runs.sharing(drawn.texts)):
                if shared:
                    left_out[key if key.endswith(name) else f"{key} {name}"] = len(shared)
                return drawn
            shared |= more

    heldout = {
        name: apart(name, Split.heldout, plan.heldout_count, plan.seq_len, f"heldout {name}") for name in plan.heldout
    }
    tests = {
        key: {name: apart(name, Split.test, item.windows, item.seq_len, f"eval.{key}") for name in item.corpora}
        for key, item in plan.evals.items()
    }
    shared = {}
    for key, item in plan.evals.items():
        # A short text, such as a heading, may stand anywhere.
        scored = {id: text for id, text in item.texts().items() if len(text) >= RUN}
        if found := runs.sharing(scored):
            shared[f"eval.{key}"] = len(found), len(scored)
    return Texts(calib, heldout, tests, generated, left_out, shared)


def _draw_calib(plan: Plan, corpus: Any, take: Any) -> list[tuple[Part, Draw]]:
    """Draw the parts of calibration; no document is in two of them, nor in the draws before this one."""
    sources = {part.corpus: corpus(part.corpus, count=part.count) for part in plan.parts}
    used: dict[str, frozenset[str]] = defaultdict(frozenset)
    for turn in range(plan.draw + 1):
        parts = []
        for part in plan.parts:
            # A text that the model writes is another one in each draw; a corpus gives each what those before it left.
            if turn < plan.draw and isinstance(plan.corpora[part.corpus], Generated):
                continue
            before = used[part.corpus]
            try:
                drawn = take(part.corpus, sources[part.corpus], Split.calib, part.count, plan.seq_len, "calib", before)
            except CorpusError as error:
                if not before:
                    raise
                raise CorpusError(
                    f"calib.draw={plan.draw}: {len(before)} documents of {part.corpus} belong to earlier draws or to "
                    f"another part of this one, and no two share a document. {error}"
                ) from error
            used[part.corpus] |= drawn.documents
            parts.append((part, drawn))
    return parts
