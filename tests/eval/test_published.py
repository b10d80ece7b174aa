import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from reprune.errors import ConfigError, CorpusError, NumericalError
from reprune.eval.published import Published
from reprune.evaluation import Subject
from reprune.model.tiny import byte_tokenizer

SHARED = Path(os.environ.get("REPRUNE_SHARED_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))


@pytest.fixture
def rows(tmp_path):
    """A file of rows, blank ones among them, and the rows."""
    texts = ["", " = River = \n", "The stone in winter.", "", *[f"Row {i} of many words." for i in range(30)]]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, texts


def published(path, **changes):
    settings = {
        "name": "wikitext2", "path": str(path), "dataset": "none", "subset": None, "data_files": None, "split": "test",
        "text_field": "text", "join": "\n\n", "documents": None, "max_windows": None, "seq_len": 32, "stride": None,
        "batch_size": 3, "max_dense": 1e6,
    }  # fmt: skip
    return Published(**(settings | changes))


def measure(item, model):
    ticks = []
    subject = Subject(model, byte_tokenizer(), {})
    result = item.dense(subject, lambda: ticks.append(1))
    assert len(ticks) == item.steps(subject)
    return result.metrics


@torch.no_grad()
def plain(model, text, seq_len, windows=None):
    """The loop of the papers: each window alone, its mean loss times seq_len, summed and divided."""
    tokens = torch.tensor([byte_tokenizer()(text)["input_ids"]])
    count = min(tokens.numel() // seq_len, windows or 10**9)
    total = 0.0
    for i in range(count):
        batch = tokens[:, i * seq_len : (i + 1) * seq_len]
        logits = model(batch).logits
        total += F.cross_entropy(logits[0, :-1], batch[0, 1:]).item() * seq_len
    return math.exp(total / (count * seq_len)), count


def test_wikitext2(rows, tiny_model):
    path, texts = rows
    metrics = measure(published(path), tiny_model())
    ppl, count = plain(tiny_model(), "\n\n".join(texts), 32)
    assert metrics["ppl/wikitext2-32"] == pytest.approx(ppl, rel=1e-5)
    assert metrics["tokens/wikitext2-32"] == count * 31
    assert metrics["bits_per_byte/wikitext2-32"] == pytest.approx(math.log2(ppl), rel=1e-5)  # a token is a byte


def test_c4_takes_the_first_documents_and_windows(rows, tiny_model):
    path, texts = rows
    metrics = measure(published(path, name="c4", join=" ", documents=10, max_windows=3), tiny_model())
    ppl, count = plain(tiny_model(), " ".join(texts[:10]), 32, windows=3)
    assert metrics["ppl/c4-32"] == pytest.approx(ppl, rel=1e-5)
    assert count == 3


def test_a_stride_scores_each_token_once_with_more_before_it(rows, tiny_model):
    path, texts = rows
    item, model = published(path, stride=8), tiny_model()
    metrics = measure(item, model)
    tokens = torch.tensor(byte_tokenizer()("\n\n".join(texts))["input_ids"])
    windows = (len(tokens) - 32) // 8 + 1
    losses = []
    for position in range(1, 32 + 8 * (windows - 1)):  # each token by itself
        start = max(0, -(-(position - 31) // 8) * 8)
        with torch.no_grad():
            logits = model(tokens[None, start : start + 32]).logits[0, position - start - 1]
        losses.append(F.cross_entropy(logits, tokens[position]).item())
    assert metrics["tokens/wikitext2-32-stride8"] == len(losses)
    assert metrics["ppl/wikitext2-32-stride8"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"stride": 32}, ConfigError, r"eval\.wikitext2\.stride=32: must be at least 1 and below"),
        ({"seq_len": 1}, ConfigError, r"eval\.wikitext2\.seq_len=1: must be at least 2"),
        ({"path": "nowhere.jsonl"}, CorpusError, r"eval\.wikitext2\.path=nowhere\.jsonl: there is no such file"),
        ({"text_field": "txt"}, CorpusError, "has no field 'txt'"),
    ],
)
def test_mistakes_before_weights(rows, changes, error, message):
    with pytest.raises(error, match=message):
        published(**({"path": rows[0]} | changes)).check()


def test_too_little_text_and_absurd_numbers(rows, tiny_model):
    with pytest.raises(CorpusError, match="less than a window"):
        measure(published(rows[0], seq_len=10_000), tiny_model())
    with pytest.raises(NumericalError, match=r"above eval\.wikitext2\.max_dense=2"):
        measure(published(rows[0], max_dense=2.0), tiny_model())


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data; REPRUNE_SHARED_DATA names its folder")
def test_the_real_wikitext2(tiny_model):
    item = published(SHARED / "wikitext2" / "test.jsonl", seq_len=256, max_windows=4)
    assert item._text.count(" = Robert Boulter = ") == 1
    ppl, _ = plain(tiny_model(), item._text, 256, windows=4)
    assert measure(item, tiny_model())["ppl/wikitext2-256"] == pytest.approx(ppl, rel=1e-5)
