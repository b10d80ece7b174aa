"""Sequences of tokens drawn from a corpus: seeded, disjoint by document between splits, and written down.

Everything random comes from hashes of the seed and of document ids, not from a generator's state: a draw is the same on
every machine and with every version of the libraries, and a document that is added moves none of the others.
"""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reprune.errors import CorpusError
from reprune.interfaces import Corpus, Split

BATCH = 8  # documents tokenised at once: tokenizers share them among cores; at most so many are tokenised in vain


SHARES = {Split.calib: 0.6, Split.heldout: 0.2, Split.test: 0.2}
# The keys that set how many sequences are drawn and how long they are; {} stands for what asks for the draw.
KEYS = {
    Split.calib: ("{}.count", "{}.seq_len"),
    Split.heldout: ("calib.heldout_count", "calib.seq_len"),
    Split.test: ("{}.windows", "{}.seq_len"),
}


@dataclass(frozen=True)
class Piece:
    """A range of a document's tokens, [start, end)."""

    document: str
    start: int
    end: int


@dataclass(frozen=True)
class Draw:
    """Sequences and where each token comes from.

    Attributes:
        tokens: (count, seq_len) int64.
        pieces: for each sequence its pieces in order. BOS and the EOS between pieces belong to none.
        corpus: its name.
        revision: of the corpus.
        split: that the documents belong to.
        seed: of the draw.
        bos: whether each sequence starts with BOS.
        pack: whether short documents were joined.
        texts: of the documents that were used, whole, by id.
        documents_available: documents in the split, less those that were excluded.
    """

    tokens: Tensor
    pieces: list[list[Piece]]
    corpus: str
    revision: str
    split: Split
    seed: int
    bos: bool
    pack: bool
    texts: dict[str, str]
    documents_available: int

    @property
    def tokens_sha256(self) -> str:
        """Hash of the tokens as little-endian int64, row by row."""
        return hashlib.sha256(self.tokens.numpy().astype("<i8").tobytes()).hexdigest()

    @property
    def documents(self) -> frozenset[str]:
        """Ids of the documents that were used."""
        return frozenset(self.texts)


def split_of(document_id: str, among: Collection[Split] = tuple(Split)) -> Split:
    """Return the split of a document by a hash of its id: 60 % calib, 20 % heldout, 20 % test.

    Args:
        document_id: of the document.
        among: the splits that share these documents, at least one, in proportion if they are not all.
    """
    splits = [split for split in Split if split in among]
    place = hashed(document_id) / 2**64 * sum(SHARES[split] for split in splits)
    for split in splits[:-1]:
        if place < SHARES[split]:
            return split
        place -= SHARES[split]
    return splits[-1]


def draw(
    corpus: Corpus,
    split: Split,
    tokenizer: Any,
    count: int,
    seq_len: int,
    seed: int,
    bos: bool,
    exclude: frozenset[str] = frozenset(),
    *,
    name: str,
    key: str = "calib",
) -> Draw:
    """Draw sequences from one split of a corpus; no token of a document is used twice.

    A document gives one sequence as long as documents last; only then is taken what is left of those used before.
    Without `corpus.pack` a sequence is a piece of one document, at a random place, and documents shorter than that are
    left out. With it, documents are joined with EOS between them until a sequence is full, and the last of them is cut.

    Args:
        corpus: the source of documents.
        split: the part of it to draw from.
        tokenizer: of the model; special tokens are added here and not by it.
        count: sequences.
        seq_len: tokens in each, BOS included.
        seed: orders the documents and places the pieces.
        bos: start each sequence with the tokenizer's BOS.
        exclude: ids of documents that must not be used.
        name: of the corpus. Two corpora of one class have two names, and the order of documents depends on it.
        key: config key of what asks for the draw, for errors: "calib", "heldout", "eval.ppl".

    Raises:
        CorpusError: the corpus cannot be read, the split has too little text, or the tokenizer has no BOS or EOS
            where one is needed.
        ValueError: count or seq_len leaves no room for a token of text.
    """
    body = seq_len - bos
    if count < 1 or body < 1:
        raise ValueError(f"{count} sequences of {seq_len} tokens, of which {int(bos)} BOS: nothing to draw")
    start = [_special(tokenizer, "bos", "Set model.bos=never.")] if bos else []
    joint = _special(tokenizer, "eos", f"Set {key}.pack=false.") if corpus.pack else None

    total, texts = 0, {}
    try:
        revision = corpus.revision()
        for document in corpus.documents():
            total += 1
            if document.id not in exclude and (document.split or split_of(document.id)) is split:
                texts[document.id] = document.text
    except CorpusError as error:
        raise CorpusError(f"corpus {name}: {error}") from error
    salt = f"{seed}/{name}/{split.value}"
    filler = _Filler(count, body, joint, salt)
    filler.fill(_tokenised(sorted(texts, key=lambda id: (hashed(salt, "order", id), id)), texts, tokenizer))
    if len(filler.done) < count:
        raise CorpusError(_too_little(filler, name, split, count, seq_len, key, total, len(texts)))
    used = {piece.document for _, pieces in filler.done for piece in pieces}
    return Draw(
        tokens=torch.tensor([start + tokens for tokens, _ in filler.done], dtype=torch.int64),
        pieces=[pieces for _, pieces in filler.done],
        corpus=name,
        revision=revision,
        split=split,
        seed=seed,
        bos=bos,
        pack=corpus.pack,
        texts={id: text for id, text in texts.items() if id in used},
        documents_available=len(texts),
    )


def manifest(drawn: Draw) -> dict[str, Any]:
    """Return what calib.json says of a draw: enough to check it and to find the text of every token."""
    count, seq_len = drawn.tokens.shape
    return {
        "corpus": drawn.corpus,
        "revision": drawn.revision,
        "split": drawn.split.value,
        "seed": drawn.seed,
        "count": count,
        "seq_len": seq_len,
        "bos": drawn.bos,
        "pack": drawn.pack,
        "tokens_sha256": drawn.tokens_sha256,
        "documents_available": drawn.documents_available,
        "documents_used": len(drawn.documents),
        "sequences": [
            [{"document": piece.document, "start": piece.start, "end": piece.end} for piece in sequence]
            for sequence in drawn.pieces
        ],
    }


@dataclass(frozen=True)
class _Range:
    """Tokens of a document that are still free; start is their place in the document."""

    document: str
    start: int
    tokens: np.ndarray  # int32: half the memory, and enough for any vocabulary

    def cut(self, start: int, end: int) -> "_Range":
        """Return a part of it, counted from its own start."""
        return _Range(self.document, self.start + start, self.tokens[start:end])


class _Filler:
    """Fills sequences with ranges of tokens, round by round, until there are enough."""

    def __init__(self, count: int, body: int, joint: int | None, salt: str) -> None:
        self.count, self.body, self.joint, self.salt = count, body, joint, salt
        self.done: list[tuple[list[int], list[Piece]]] = []
        self.tokens: list[int] = []
        self.pieces: list[Piece] = []
        self.seen = self.seen_tokens = self.short = 0

    def fill(self, whole: Iterator[_Range]) -> None:
        """Take at most one sequence from each document in a round, and go on with what is left of them."""
        left: list[list[_Range]] = []
        for document in whole:
            self.seen += 1
            self.seen_tokens += len(document.tokens)
            self.short += len(document.tokens) < self.body
            left.append(self._take([document], scatter=True))
            if len(self.done) == self.count:
                return
        while left := [ranges for ranges in left if ranges]:
            for index, ranges in enumerate(left):
                left[index] = self._take(ranges, scatter=False)
                if len(self.done) == self.count:
                    return

    def _take(self, ranges: list[_Range], scatter: bool) -> list[_Range]:
        """Take one piece from the free ranges of a document; return those that are free afterwards and of use."""
        if self.joint is None:
            ranges = [item for item in ranges if len(item.tokens) >= self.body]
        else:
            ranges = [item for item in ranges if len(item.tokens)]
        if not ranges:
            return []
        first, *rest = ranges
        room = self.body - len(self.tokens)
        length = min(room, len(first.tokens))
        spare = len(first.tokens) - length
        # Only the first piece of a document is placed at random: later ones lie close, so that little is wasted.
        random = scatter and not self.tokens
        start = hashed(self.salt, "place", first.document) % (spare + 1) if random else 0
        self._append(first.cut(start, start + length))
        return [first.cut(0, start), first.cut(start + length, len(first.tokens)), *rest]

    def _append(self, item: _Range) -> None:
        self.tokens += item.tokens.tolist()
        self.pieces.append(Piece(item.document, item.start, item.start + len(item.tokens)))
        if self.joint is not None and len(self.tokens) < self.body:
            self.tokens.append(self.joint)
        if len(self.tokens) == self.body:
            self.done.append((self.tokens, self.pieces))
            self.tokens, self.pieces = [], []


def _tokenised(ids: list[str], texts: dict[str, str], tokenizer: Any) -> Iterator[_Range]:
    """Tokenise documents in the order of ids, a few at a time and no further than is asked for."""
    for begin in range(0, len(ids), BATCH):
        batch = ids[begin : begin + BATCH]
        encoded = tokenizer(
            [texts[id] for id in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,  # no warning that a document is longer than the model's positions: it is cut below
        )["input_ids"]
        for id, tokens in zip(batch, encoded, strict=True):
            yield _Range(id, 0, np.array(tokens, dtype=np.int32))


def _special(tokenizer: Any, which: str, remedy: str) -> int:
    token = getattr(tokenizer, f"{which}_token_id")
    if token is None:
        raise CorpusError(f"The tokenizer has no {which.upper()} token, which sequences were to have. {remedy}")
    assert isinstance(token, int)
    return token


def hashed(*parts: str) -> int:
    """Return 64 bits that depend on every part and on where one ends and the next begins."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _too_little(
    filler: _Filler, name: str, split: Split, count: int, seq_len: int, key: str, total: int, available: int
) -> str:
    count_key, len_key = (text.format(key) for text in KEYS[split])
    asked = f"{count_key}={count}, {len_key}={seq_len}: {count * seq_len} tokens are asked of corpus {name}"
    if available == 0:
        return (
            f"{asked}, but none of its {total} documents is in the split {split.value}. Splits hold whole documents "
            f"(60 % calib, 20 % heldout, 20 % test), so a corpus needs a few. Give more text, or another corpus; with "
            f"corpus local a smaller chunk_chars cuts .txt files at more of their blank lines."
        )
    short = f", {filler.short} of them shorter than a sequence" if filler.short and filler.joint is None else ""
    packing = f", or join short documents with {key}.pack=true" if short and split is Split.calib else ""
    return (
        f"{asked}, but its split {split.value} gives only {len(filler.done)} such sequences ({filler.seen} documents "
        f"with {filler.seen_tokens} tokens{short}). Lower {count_key} or {len_key}{packing}, give more text, or use "
        f"another corpus."
    )
