import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import LlamaConfig

from reprune.calib import selfgen
from reprune.config import build
from reprune.draw import draw, split_of
from reprune.errors import ConfigError, CorpusError
from reprune.interfaces import Document, Split, Writer
from reprune.model.tiny import byte_tokenizer

YAML = Path(__file__).resolve().parents[2] / "conf" / "calib" / "selfgen.yaml"
SMALL = {
    "start_languages": None,
    "languages": None,
    "max_length": 40,
    "min_length": 5,
    "batch_size": 4,
    "drop_fraction": 0.0,
    "greedy_tokens": 2,
    "dtype": "float64",
}
EOS = 257


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REPRUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def settings(**changes):
    """The settings of the YAML, small and without filters unless told."""
    node = OmegaConf.to_container(OmegaConf.load(YAML))
    assert node.pop("name") == "selfgen"
    return build({**node, **SMALL, **changes}, "calib")


class Base:
    pack = True

    def __init__(self, texts=()):
        self.texts = texts

    def documents(self):
        return [Document(str(index), text) for index, text in enumerate(self.texts)]

    def revision(self):
        return f"made of {len(self.texts)}"


class Scripted(nn.Module):
    """A model whose next token depends on the last one alone, as a table says; nothing is random about it."""

    def __init__(self, follows):
        super().__init__()
        self.logits = nn.Parameter(torch.full((258, 258), -1e4).scatter_(1, torch.tensor(follows)[:, None], 0.0))
        self.config = LlamaConfig(num_hidden_layers=1)
        self.generation_config = SimpleNamespace(eos_token_id=[EOS])

    device = property(lambda self: self.logits.device)

    def forward(self, input_ids, use_cache, cache):
        return SimpleNamespace(logits=self.logits[input_ids])


def writer(model, seed=0, bos=False, tokenizer=None):
    return Writer(model, tokenizer or byte_tokenizer(), bos, torch.device("cpu"), seed)


def write(made, author, count=3, seq_len=50, split=Split.calib, turn=0, base=None):
    return made.write(author, base or Base(), split, count, seq_len, turn)


def texts(written):
    return {item.id: item.text for item in written.documents()}


def test_the_same_seed_gives_the_same_texts_and_another_one_others(tiny_model, cache, monkeypatch, tmp_path):
    first = write(settings(), writer(tiny_model()))
    monkeypatch.setenv("REPRUNE_CACHE", str(tmp_path / "other"))
    again = write(settings(), writer(tiny_model()))
    assert texts(again) == texts(first)
    assert again.revision() == first.revision()
    other = write(settings(), writer(tiny_model(), seed=1))
    assert not set(texts(other).values()) & set(texts(first).values())


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize("start", ["random_token", "bos", "prefix"])
def test_the_batch_size_changes_no_text(tiny_model, monkeypatch, tmp_path, size, start):
    base = Base([f"{index} was the number of it" for index in range(100)])
    changes = {"start": start, "drop_fraction": 0.3, "top_k": 200, "temperature": 1.5}
    expected = write(settings(**changes), writer(tiny_model()), count=8, base=base)
    assert expected.manifest["dropped"]["perplexity"] >= 1
    monkeypatch.setenv("REPRUNE_CACHE", str(tmp_path / "other"))
    written = write(settings(**changes, batch_size=size), writer(tiny_model()), count=8, base=base)
    assert texts(written) == texts(expected)
    moving = {"seconds"}
    assert {k: v for k, v in written.manifest.items() if k not in moving} == {
        k: v for k, v in expected.manifest.items() if k not in moving
    }


def test_the_texts_fill_the_draw(tiny_model):
    made, author = settings(), writer(tiny_model(), bos=True)
    written = write(made, author, count=4, seq_len=33)
    drawn = draw(written, Split.calib, author.tokenizer, 4, 33, 0, True, name="selfgen")
    assert drawn.corpus == "selfgen"
    assert drawn.tokens.shape == (4, 33)
    assert (drawn.tokens[:, 0] == author.tokenizer.bos_token_id).all()
    lengths = [len(author.tokenizer(text)["input_ids"]) for text in texts(written).values()]
    assert written.manifest["tokens"] == sum(lengths) >= 4 * 32
    assert written.manifest["lengths"]["max"] == max(lengths)
    assert sum(lengths[:-1]) < 4 * 32  # no more is kept than is needed


def test_without_packing_every_text_fills_a_sequence(tiny_model):
    made, author = settings(pack=False, max_length=400, tries=2000), writer(tiny_model())
    written = write(made, author, count=2, seq_len=24)
    assert draw(written, Split.calib, author.tokenizer, 2, 24, 0, False, name="selfgen").tokens.shape == (2, 24)
    assert written.manifest["dropped"]["short"] > 0


def test_documents_are_of_one_split_and_of_one_draw(tiny_model):
    author = writer(tiny_model())
    calib, heldout = (write(settings(), author, split=split) for split in (Split.calib, Split.heldout))
    assert {split_of(id) for id in texts(calib)} == {Split.calib}
    assert {split_of(id) for id in texts(heldout)} == {Split.heldout}
    second = write(settings(), author, turn=1)
    assert not texts(second).keys() & texts(calib).keys()
    assert not set(texts(second).values()) & set(texts(calib).values())


def test_random_starts_are_uniform_tokens_and_greedy_ones(tiny_model, monkeypatch):
    # The model writes token + 1, so a start is three tokens in a row, and EOS comes after 'z'.
    follows = [(token + 1) % 256 for token in range(258)]
    follows[ord("z")] = EOS
    written = write(settings(max_repeats=1.0), writer(Scripted(follows)), count=20)
    tokenizer = byte_tokenizer()
    starts = [tokenizer(text)["input_ids"][0] for text in texts(written).values()]
    assert len(set(starts)) > len(starts) / 2
    assert max(starts) - min(starts) > 128


def test_prefixes_come_from_documents_of_the_split(tiny_model):
    base = Base([f"{index:03d} has a text" for index in range(200)])
    written = write(settings(start="prefix", prefix_tokens=3), writer(tiny_model()), base=base, split=Split.test)
    for text in texts(written).values():
        assert split_of(str(int(text[:3]))) is Split.test
    assert "base" in written.manifest


def test_too_few_prefixes(tiny_model):
    base = Base(["one document", "another"])
    with pytest.raises(CorpusError, match="has no more documents"):
        write(settings(start="prefix"), writer(tiny_model()), count=50, base=base)


def test_the_worst_texts_are_dropped(tiny_model, monkeypatch, tmp_path):
    loose = write(settings(drop_fraction=0.0, temperature=2.0), writer(tiny_model()), count=8)
    monkeypatch.setenv("REPRUNE_CACHE", str(tmp_path / "other"))
    strict = write(settings(drop_fraction=0.5, temperature=2.0), writer(tiny_model()), count=8)
    assert strict.manifest["dropped"]["perplexity"] == pytest.approx(strict.manifest["texts"], abs=1)
    assert strict.manifest["perplexity"]["median"] < loose.manifest["perplexity"]["median"]
    assert strict.manifest["accept_rate"] < loose.manifest["accept_rate"]


def test_languages_are_filtered(tiny_model, monkeypatch):
    monkeypatch.setattr(selfgen, "_language", lambda text: "en" if "e" in text.lower() else "de")
    strict = write(settings(languages=["en"]), writer(tiny_model()))
    assert all("e" in text.lower() for text in texts(strict).values())
    assert strict.manifest["dropped"]["language"] > 0
    assert strict.manifest["languages"] == {"en": strict.manifest["texts"]}
    starts = write(settings(start_languages=["de"]), writer(tiny_model()))
    assert starts.manifest["dropped"]["language of the start"] > 0


def test_the_library_knows_languages():
    assert selfgen._language("The old men of the village met in the evening and spoke about the weather.") == "en"
    assert selfgen._language("Die alten Leute im Dorf trafen sich am Abend und sprachen vom Wetter.") == "de"


def test_a_model_that_ends_at_once():
    model = Scripted([EOS] * 258)
    with pytest.raises(CorpusError, match=r"0 of the 150 tokens.* 150 ended in its start. Try calib.start=prefix"):
        write(settings(), writer(model))
    with pytest.raises(CorpusError, match=r"150 short\. Try a lower calib.min_length"):
        write(settings(start="bos"), writer(model))


def test_a_model_that_loops():
    letters = byte_tokenizer()("abcde")["input_ids"]
    follows = [letters[(token + 1) % 5] for token in range(258)]
    with pytest.raises(CorpusError, match=r"150 loop\. Try calib.repetition_penalty=1.2"):
        write(settings(), writer(Scripted(follows)))
    with pytest.raises(CorpusError, match=r"149 twice\."):  # where loops are let in, it is one text all the same
        write(settings(max_repeats=1.0, start="bos"), writer(Scripted(follows)))


def test_texts_that_are_all_too_short(tiny_model):
    with pytest.raises(CorpusError, match=r"0 of the 3 texts needed were kept\. Dropped: 150 short"):
        write(settings(pack=False), writer(tiny_model()), seq_len=300)


def test_no_language_passes(tiny_model, monkeypatch):
    monkeypatch.setattr(selfgen, "_language", lambda text: "zxx")
    with pytest.raises(CorpusError, match=r"150 language of the start\. Try calib\.start_languages=null"):
        write(settings(start_languages=["en"]), writer(tiny_model()))


def test_a_tokenizer_without_special_tokens(tiny_model):
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    author = writer(tiny_model(), tokenizer=tokenizer)
    model_ends = write(settings(), author)  # the model's own EOS still ends texts
    assert model_ends.manifest["texts"] > 0
    with pytest.raises(CorpusError, match=r"calib\.start=bos: the tokenizer has no BOS token"):
        write(settings(start="bos"), author)
    with pytest.raises(CorpusError, match="The tokenizer has no EOS token"):
        draw(model_ends, Split.calib, tokenizer, 3, 50, 0, False, name="selfgen")


def test_special_tokens_end_a_text_and_start_none(tiny_model):
    follows = [(token + 7) % 256 for token in range(258)]
    follows[70] = 256  # BOS in the middle of a text
    written = write(settings(max_repeats=1.0, greedy_tokens=0, min_length=1), writer(Scripted(follows)), count=8)
    joined = "".join(texts(written).values())
    assert "<bos>" not in joined
    assert "<eos>" not in joined
    assert written.manifest["lengths"]["min"] < 40


def test_texts_are_written_once(tiny_model, monkeypatch):
    first = write(settings(), writer(tiny_model()))
    monkeypatch.setattr(selfgen, "generate", lambda *_: pytest.fail("written again"))
    again = write(settings(batch_size=9), writer(tiny_model()))  # batch size is no part of the key
    assert (texts(again), again.manifest) == (texts(first), first.manifest)
    for change in ({"temperature": 0.9}, {"max_length": 41}, {"drop_fraction": 0.1}):
        with pytest.raises(pytest.fail.Exception):
            write(settings(**change), writer(tiny_model()))
    with pytest.raises(pytest.fail.Exception):
        write(settings(), writer(tiny_model(seed=1)))  # another model


@pytest.mark.parametrize("file", ["texts.jsonl", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_damaged_texts_are_written_again(tiny_model, cache, capsys, file, damage):
    first = write(settings(), writer(tiny_model()))
    (path,) = cache.glob(f"texts/selfgen-*/{file}")
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"{}" + content[2:])
    again = write(settings(), writer(tiny_model()))
    assert texts(again) == texts(first)
    said = capsys.readouterr().err
    assert "is damaged" in said
    assert "making it again" in said
    assert path.exists()


def test_the_manifest(tiny_model, cache):
    written = write(settings(drop_fraction=0.2), writer(tiny_model()), count=6)
    told = written.manifest
    assert json.loads(next(cache.glob("texts/*/manifest.json")).read_text()) == told
    assert told["candidates"] == told["texts"] + sum(told["dropped"].values())
    assert told["accept_rate"] == told["texts"] / told["candidates"]
    assert told["samples"] == list(texts(written).values())[:5]
    assert told["seconds"] >= 0
    assert told["settings"]["temperature"] == 1.0
    assert {"torch", "transformers", "py3langid"} <= told["versions"].keys()


WRONG = {
    "generated_count": 0, "mode": "both", "use": [], "start": "middle", "greedy_tokens": -1, "prefix_tokens": 0,
    "start_languages": [], "languages": ["xx"], "temperature": 0.0, "top_k": 0, "top_p": 0.0,
    "repetition_penalty": -1.0, "start_temperature": 0.0, "start_tokens": 0, "max_length": 4, "min_length": 0,
    "max_repeats": 0.0, "tries": 0, "drop_fraction": 1.0, "batch_size": 0, "dtype": "int8",
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG)
def test_settings_out_of_range(key):
    with pytest.raises(ConfigError, match=rf"calib\.{key}"):
        settings(**{key: WRONG[key]})


def test_parts():
    made = settings(generated_count=5)
    assert [(part.corpus, part.count, {use.value for use in part.use}) for part in made.parts("selfgen", 8)] == [
        ("sotu", 8, {"mask", "recon"}),
        ("selfgen", 5, {"recon"}),
    ]
    assert [part.count for part in settings(generated_count=5, mode="replace").parts("selfgen", 8)] == [3, 5]
    with pytest.raises(ConfigError, match=r"there are only calib\.count=4 sequences to replace"):
        settings(generated_count=5, mode="replace").parts("selfgen", 4)
