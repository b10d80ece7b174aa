import hashlib
import json
import logging
import random
import struct
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from reprune.draw import Split, draw, manifest, split_of
from reprune.errors import CorpusError
from reprune.interfaces import Document


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte, and a maximal length that every document exceeds."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<s>", "</s>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=8, **special)


class Texts:
    def __init__(self, texts: dict[str, str], pack: bool) -> None:
        self.texts, self.pack = texts, pack

    def documents(self):
        return [Document(key, text) for key, text in self.texts.items()]

    def revision(self) -> str:
        return "1"


def corpus(count: int, least: int, most: int, pack: bool, split: Split | None = Split.calib, seed: int = 0) -> Texts:
    """Random letters; every document of the split that is asked for, or of any."""
    generator = random.Random(seed)
    texts: dict[str, str] = {}
    number = 0
    while len(texts) < count:
        key = f"doc{number}"
        number += 1
        if split is None or split_of(key) is split:
            texts[key] = "".join(generator.choices("abcdefgh", k=generator.randint(least, most)))
    return Texts(texts, pack)


TOKENIZER = byte_tokenizer(bos_token="<s>", eos_token="</s>")


def take(
    source, count, seq_len, *, split=Split.calib, seed=0, bos=False, tokenizer=TOKENIZER, name="test_draw", **more
):
    return draw(source, split, tokenizer, count, seq_len, seed, bos, name=name, **more)


def check(drawn, source, seq_len, bos):
    """Rebuild every sequence from its pieces, and see that no token of a document is used twice."""
    assert drawn.tokens.dtype == torch.int64
    used: Counter[tuple[str, int]] = Counter()
    for row, pieces in zip(drawn.tokens.tolist(), drawn.pieces, strict=True):
        built = [TOKENIZER.bos_token_id] if bos else []
        for number, piece in enumerate(pieces):
            if number:
                built.append(TOKENIZER.eos_token_id)
            tokens = TOKENIZER(source.texts[piece.document], add_special_tokens=False)["input_ids"]
            assert 0 <= piece.start < piece.end <= len(tokens)
            built += tokens[piece.start : piece.end]
            used.update((piece.document, place) for place in range(piece.start, piece.end))
        if len(built) == seq_len - 1:  # a document that ends one short of the end is still closed
            built.append(TOKENIZER.eos_token_id)
        assert row == built
        assert len(row) == seq_len
    assert max(used.values()) == 1


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("least", "most"), [(1, 60), (10, 300), (200, 400)])
@pytest.mark.parametrize("count", [1, 7, 30, 60])
def test_sequences_are_what_their_pieces_say(pack, bos, least, most, count):
    source = corpus(40, least, most, pack)
    try:
        drawn = take(source, count, 32, bos=bos)
    except CorpusError:
        assert (least, count) in {(1, 30), (1, 60)}  # too little text is right for these only
        return
    check(drawn, source, 32, bos)
    assert drawn.tokens.shape == (count, 32)


def test_a_document_gives_one_sequence_while_documents_last():
    source = corpus(20, 100, 400, pack=False)
    drawn = take(source, 20, 32)
    assert len(drawn.documents) == 20
    more = take(source, 40, 32)
    check(more, source, 32, False)
    assert [piece for pieces in more.pieces[:20] for piece in pieces] == [p for ps in drawn.pieces for p in ps]


def test_later_rounds_waste_little():
    lengths = Counter({key: len(text) for key, text in corpus(20, 100, 400, pack=False).texts.items()})
    possible = sum(length // 32 - 1 for length in lengths.values())  # a random place costs a sequence at most
    check(take(source := corpus(20, 100, 400, pack=False), possible, 32), source, 32, False)


def test_packing_uses_every_token():
    source = corpus(30, 5, 50, pack=True)
    tokens = sum(map(len, source.texts.values()))
    drawn = take(source, (tokens + 29) // 32, 32)  # at least 29 EOS join the documents
    check(drawn, source, 32, False)
    with pytest.raises(CorpusError):
        take(source, tokens // 16, 32)


def test_packed_documents_are_whole_but_for_the_last():
    source = corpus(200, 5, 20, pack=True)
    for pieces in take(source, 20, 64).pieces:
        for piece in pieces[:-1]:
            assert (piece.start, piece.end) == (0, len(source.texts[piece.document]))


def test_places_are_random():
    source = corpus(50, 1000, 1000, pack=False)
    starts = [pieces[0].start for pieces in take(source, 50, 32).pieces]
    assert len(set(starts)) > 40
    assert min(starts) < 200
    assert max(starts) > 768


def test_same_seed_same_bits_and_order_of_documents_does_not_matter():
    source = corpus(50, 10, 100, pack=True)
    reversed_source = Texts(dict(reversed(source.texts.items())), True)
    first, second, other = take(source, 10, 32), take(reversed_source, 10, 32), take(source, 10, 32, seed=1)
    assert torch.equal(first.tokens, second.tokens)
    assert first.pieces == second.pieces
    assert first.tokens_sha256 == second.tokens_sha256 != other.tokens_sha256


def test_the_draw_itself_does_not_change():
    """A stored hash: runs of another version or machine must be able to draw the same."""
    assert take(corpus(50, 10, 100, pack=True), 10, 32, bos=True).tokens_sha256.startswith("06744052a1657629")
    assert take(corpus(50, 10, 100, pack=False), 10, 32).tokens_sha256.startswith("5b15528dce67d565")


def test_splits_are_disjoint_and_of_the_right_size():
    shares = Counter(split_of(f"document {number}") for number in range(20_000))
    assert shares[Split.calib] / 20_000 == pytest.approx(0.6, abs=0.015)
    assert shares[Split.heldout] / 20_000 == pytest.approx(0.2, abs=0.015)
    assert shares[Split.test] / 20_000 == pytest.approx(0.2, abs=0.015)
    source = corpus(300, 50, 100, pack=True, split=None)
    drawn = [take(source, 10, 32, split=split) for split in Split]
    for one in drawn:
        assert all(split_of(key) is one.split for key in one.documents)
    assert sum(one.documents_available for one in drawn) == 300


def test_a_document_may_say_where_it_belongs():
    """Split by the source: every document of the corpus, whatever its id."""

    class Sorted(Texts):
        def documents(self):
            return [
                Document(key, text, Split.test if number < 10 else Split.calib)
                for number, (key, text) in enumerate(self.texts.items())
            ]

    source = Sorted(corpus(30, 40, 60, pack=False, split=Split.heldout).texts, False)
    assert take(source, 10, 32, split=Split.test).documents == frozenset(list(source.texts)[:10])
    assert take(source, 20, 32, split=Split.calib).documents == frozenset(list(source.texts)[10:])
    with pytest.raises(CorpusError, match=r"none of its 30 documents is in the split heldout"):
        take(source, 1, 32, split=Split.heldout)


def test_splits_that_share_documents_keep_their_proportion():
    keys = [f"document {number}" for number in range(20_000)]
    for among, share in (((Split.calib, Split.heldout), 0.75), ((Split.heldout, Split.test), 0.5), ((Split.test,), 1)):
        counts = Counter(split_of(key, among) for key in keys)
        assert counts.keys() == set(among)
        assert counts[among[0]] / len(keys) == pytest.approx(share, abs=0.015)


def test_the_name_decides_the_order():
    source = corpus(50, 40, 60, pack=False)
    assert take(source, 10, 32, name="a").documents != take(source, 10, 32, name="b").documents


def test_what_a_corpus_finds_wrong_is_said_with_its_name():
    class Broken(Texts):
        def documents(self):
            raise CorpusError("a.txt: is broken.")

    with pytest.raises(CorpusError, match=r"^corpus mine: a\.txt: is broken\.$"):
        take(Broken({}, True), 1, 32, name="mine")


def test_excluded_documents_never_appear():
    source = corpus(30, 40, 60, pack=False)
    first = take(source, 10, 32)
    second = take(source, 20, 32, exclude=first.documents)
    assert not first.documents & second.documents
    assert second.documents_available == 20
    with pytest.raises(CorpusError):
        take(source, 21, 32, exclude=first.documents)


def test_documents_are_tokenised_as_needed_and_without_warning(caplog, recwarn):
    calls = []

    class Counting:
        bos_token_id, eos_token_id = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id

        def __call__(self, texts, **settings):
            calls.extend(texts)
            return TOKENIZER(texts, **settings)

    with caplog.at_level(logging.WARNING):
        take(corpus(500, 100, 200, pack=False), 10, 32, tokenizer=Counting())
    assert 10 <= len(calls) <= 20
    assert not caplog.records
    assert not recwarn.list


def test_manifest():
    source = corpus(30, 40, 60, pack=False)
    drawn = take(source, 5, 32, bos=True, seed=3)
    found = json.loads(json.dumps(manifest(drawn)))
    packed = struct.pack(f"<{5 * 32}q", *drawn.tokens.flatten().tolist())
    assert found["tokens_sha256"] == hashlib.sha256(packed).hexdigest()
    assert found["corpus"] == "test_draw"
    assert found | {"sequences": None, "tokens_sha256": None, "corpus": None} == {
        "corpus": None,
        "revision": "1",
        "split": "calib",
        "seed": 3,
        "count": 5,
        "seq_len": 32,
        "bos": True,
        "pack": False,
        "tokens_sha256": None,
        "documents_available": 30,
        "documents_used": 5,
        "sequences": None,
    }
    assert [[(p["document"], p["start"], p["end"]) for p in row] for row in found["sequences"]] == [
        [(p.document, p.start, p.end) for p in row] for row in drawn.pieces
    ]


@pytest.mark.parametrize(
    ("split", "key", "keys"),
    [
        (Split.calib, "calib", ("calib.count=50", "calib.seq_len=32")),
        (Split.heldout, "heldout wiki", ("calib.heldout_count=50", "calib.seq_len=32")),
        (Split.test, "eval.ppl", ("eval.ppl.windows=50", "eval.ppl.seq_len=32")),
    ],
)
def test_too_little_text(split, key, keys):
    source = corpus(10, 40, 60, pack=False, split=split)
    with pytest.raises(CorpusError) as caught:
        take(source, 50, 32, split=split, key=key)
    tokens = sum(map(len, source.texts.values()))
    for part in (*keys, "1600 tokens", f"split {split.value}", "10 documents", f"{tokens} tokens", "another corpus"):
        assert part in str(caught.value)


def test_documents_shorter_than_a_sequence():
    with pytest.raises(CorpusError, match=r"only 0 such sequences.*10 of them shorter.*calib\.pack=true"):
        take(corpus(10, 5, 20, pack=False), 5, 32)


@pytest.mark.parametrize("split", [Split.heldout, Split.test])
def test_a_corpus_of_one_document_has_empty_splits(split):
    with pytest.raises(CorpusError, match=rf"none of its 1 documents is in the split {split.value}.*chunk_chars"):
        take(corpus(1, 10_000, 10_000, pack=True, split=Split.calib), 5, 32, split=split)


def test_special_tokens_that_are_missing():
    source = corpus(30, 40, 60, pack=True)
    with pytest.raises(CorpusError, match=r"no BOS token.*model\.bos=never"):
        take(source, 5, 32, bos=True, tokenizer=byte_tokenizer(eos_token="</s>"))
    with pytest.raises(CorpusError, match=r"no EOS token.*calib\.pack=false"):
        take(source, 5, 32, tokenizer=byte_tokenizer(bos_token="<s>"))
    take(Texts(source.texts, False), 5, 32, tokenizer=byte_tokenizer())


@pytest.mark.parametrize(("count", "seq_len", "bos"), [(0, 8, False), (1, 0, False), (1, 1, True)])
def test_nothing_to_draw(count, seq_len, bos):
    with pytest.raises(ValueError, match="nothing to draw"):
        take(corpus(3, 40, 60, pack=True), count, seq_len, bos=bos)
