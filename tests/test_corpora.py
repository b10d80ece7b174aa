import json

import pytest
import torch

from reprune.corpora import draw_texts
from reprune.errors import ConfigError, CorpusError
from reprune.interfaces import Writer
from reprune.model.tiny import byte_tokenizer

SMALL = ["calib.count=5", "calib.seq_len=64", "calib.heldout_count=2", "eval.ppl.seq_len=64", "eval.ppl.windows=3"]


@pytest.fixture
def texts_of(plan_of):
    """(overrides) -> the texts of a run on the local file."""

    def make(overrides=()):
        plan = plan_of([*(SMALL if not any(item.startswith("eval=") for item in overrides) else SMALL[:3]), *overrides])
        return draw_texts(plan, Writer(None, byte_tokenizer(), False, torch.device("cpu"), plan.seed))

    return make


def documents(texts):
    return {id for _, drawn in texts.calib for id in drawn.documents}


def test_draws_share_no_document(texts_of):
    draws = [texts_of([f"calib.draw={turn}"]) for turn in range(4)]
    used = [documents(texts) for texts in draws]
    assert len(set.union(*used)) == sum(map(len, used))
    for texts in draws[1:]:  # what is measured stays the same
        for name, drawn in texts.heldout.items():
            assert torch.equal(drawn.tokens, draws[0].heldout[name].tokens)
        assert torch.equal(texts.tests["ppl"]["local"].tokens, draws[0].tests["ppl"]["local"].tokens)


def test_the_first_draw_is_what_a_run_without_draws_takes(texts_of):
    assert torch.equal(texts_of().streams["calib"], texts_of(["calib.draw=0"]).streams["calib"])


def test_a_draw_does_not_depend_on_those_after_it(texts_of):
    again = texts_of(["calib.draw=1"])
    assert documents(again) == documents(texts_of(["calib.draw=1"]))


def test_too_many_draws(texts_of):
    with pytest.raises(CorpusError, match=r"calib\.draw=100: \d+ documents of local belong to earlier draws"):
        texts_of(["calib.draw=100"])


def test_a_draw_that_cannot_be(plan_of):
    with pytest.raises(ConfigError, match=r"calib\.draw=-1: must be at least 0"):
        plan_of(["calib.draw=-1"])
    with pytest.raises(ConfigError, match=r"calib\.draw=1\.5: must be a whole number"):
        plan_of(["calib.draw=1.5"])


@pytest.fixture
def copies(tmp_path, text_file):
    """The local file's paragraphs once more, each inside of a longer document, as another corpus would have them."""
    paragraphs = text_file.read_text().split("\n\n")
    rows = [f"A heading of number {index}.\n{text}\nA line after it." for index, text in enumerate(paragraphs)]
    path = tmp_path / "copies.txt"
    path.write_text("\n\n".join(row.replace("\n", " ") for row in rows))
    return path


def test_text_that_is_in_two_corpora_is_not_tested_on(texts_of, copies, monkeypatch):
    """Half of what the copy would test on is calibration text, so it is left out and the rest is tested."""
    other = f"{{wiki:{{_target_:reprune.calib.local.Local,paths:{copies},text_field:text,chunk_chars:300,pack:true}}}}"
    texts = texts_of([f"heldout=[{other}]", "calib.count=40", "calib.heldout_count=10", "calib.chunk_chars=300"])
    assert texts.left_out["heldout wiki"] > 0
    calib = " ".join(text for _, drawn in texts.calib for text in drawn.texts.values())
    for text in texts.heldout["wiki"].texts.values():
        assert " ".join(text.split()[5:45]) not in " ".join(calib.split())
    assert any("of its documents, which share 200 letters or more" in note for note in texts.notes())


def test_a_corpus_that_is_mostly_calibration_text_cannot_test(texts_of, copies):
    other = f"{{wiki:{{_target_:reprune.calib.local.Local,paths:{copies},text_field:text,chunk_chars:300,pack:true}}}}"
    with pytest.raises(CorpusError, match="of its documents were left out: they share 200 letters"):
        texts_of(["calib.count=1500", f"heldout=[{other}]", "calib.heldout_count=400", "calib.chunk_chars=300"])


def test_the_same_corpus_for_calibration_and_test_is_said(texts_of):
    assert any("calibration and held-out text are both from local" in note for note in texts_of().notes())
    assert not any("both from" in note for note in texts_of(["heldout=[]", "eval=[]"]).notes())


def test_calibration_text_in_a_published_protocol_is_reported(texts_of, text_file, tmp_path):
    paragraphs = [text for text in text_file.read_text(encoding="utf-8").split("\n\n") if text.strip()]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*paragraphs, "short", "New. " * 100]))
    texts = texts_of(["eval=[wikitext2]", f"eval.wikitext2.path={rows}", "eval.wikitext2.seq_len=64"])
    some, every = texts.shared["eval.wikitext2"]
    assert 0 < some < every == len(paragraphs) + 1  # those of other splits, and the new one, share nothing
    assert any(note.startswith(f"eval.wikitext2: {some} of the {every} texts") for note in texts.notes())
    assert texts.manifest()["shared"] == {"eval.wikitext2": (some, every)}
    rows.write_text(json.dumps({"text": "New. " * 100}) + "\n")
    apart = texts_of(["eval=[wikitext2]", f"eval.wikitext2.path={rows}", "eval.wikitext2.seq_len=64"])
    assert apart.shared == {}
