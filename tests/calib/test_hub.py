import gzip
import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants
from hydra import compose, initialize_config_dir

from reprune.cli import load_option
from reprune.config import build_plan
from reprune.draw import draw, split_of
from reprune.errors import ConfigError, CorpusError
from reprune.interfaces import Split
from reprune.model.tiny import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("REPRUNE_SHARED_DATA", ROOT.parent / "shared" / "data"))
ODD = "a\u2028b\u0085c\x00d\U0001f600 e"
GERMAN = "Der Fluß fließt im Winter unter dem Eis, und die Älteren erzählen sich Geschichten darüber."


def words(number, count=40):
    return " ".join(f"w{(number * 7919 + place * 104729) % 1000}" for place in range(count))


def parquet(texts, field="text", group=50):
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({field: texts}), out, row_group_size=group)
    return out.getvalue()


def json_gz(texts):
    lines = (json.dumps({"text": text, "url": "x"}, ensure_ascii=False) for text in texts)
    return gzip.compress("".join(line + "\n" for line in lines).encode(), mtime=0)


def corpus(*overrides):
    """The corpus that calib=... builds, through the repository's own config."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        plan = build_plan(compose("config", overrides=["run_name=x", "heldout=[]", *overrides]), load_option)
    return plan.corpora[plan.calib]


def texts(found, split=None):
    return [item.text for item in found.documents() if split is None or item.split is split]


C4_TRAIN, C4_VALIDATION = "en/c4-train.00000-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz"
ARTICLES = {
    name: [
        row
        for number in range(start, start + count)
        for row in (
            "",
            f" = Title {number} = \n",
            "",
            f" {words(number)} \n",
            " = = Section = = \n",
            f" {ODD} {number} \n",
        )
    ]
    for name, start, count in (("train", 0, 12), ("validation", 100, 3), ("test", 200, 4))
}


@pytest.fixture
def filled(hub):
    """The hub with small data sets of the same form as C4, WikiText-2 and PTB."""
    train = [words(number) for number in range(60)] + [ODD, GERMAN, "", " \n", words(3)]
    hub.add("allenai/c4", {C4_TRAIN: json_gz(train), C4_VALIDATION: json_gz([words(3), words(500), words(501)])})
    hub.add(
        "Salesforce/wikitext",
        {f"wikitext-2-raw-v1/{name}-00000-of-00001.parquet": parquet(rows) for name, rows in ARTICLES.items()},
    )
    sentences = {name: [words(n, 9) for n in range(900)] for name in ("train", "validation", "test")}
    sentences = {name: [f"{name} {text}" for text in rows] for name, rows in sentences.items()}
    hub.add(
        "ptb-text-only/ptb_text_only",
        {f"penn_treebank/{name}/0000.parquet": parquet(rows, "sentence") for name, rows in sentences.items()},
        "refs/convert/parquet",
    )
    return hub


def test_c4(filled):
    found = corpus("calib=c4")
    documents = list(found.documents())
    assert {item.text for item in documents} == {words(n) for n in range(60)} | {ODD, GERMAN, words(500), words(501)}
    # Text 3 is in both files: it is of the train split alone.
    assert [item.text for item in documents if item.split is Split.test] == [words(500), words(501)]
    shares = [sum(item.split is split for item in documents) for split in Split]
    assert shares[0] > 2 * shares[1] > 0
    for item in documents:
        if item.split is not Split.test:
            assert item.split is split_of(item.id, [Split.calib, Split.heldout])
    sha = filled.sha("allenai/c4", "main")
    assert found.revision() == (f"allenai/c4@{sha}: {C4_TRAIN}, {C4_VALIDATION}, first 20000 documents of each split")
    assert found.joined(Split.test, 2) == f"{words(3)} {words(500)}"
    assert not any("tree" in path for _, path in filled.asked)  # no listing of thousands of shards


def test_c4_takes_pieces_of_documents_that_are_long_enough(filled):
    found = corpus("calib=c4")
    drawn = draw(found, Split.calib, byte_tokenizer(), 5, 64, 0, False, name="c4")
    assert all(len(pieces) == 1 for pieces in drawn.pieces)
    assert len(drawn.documents) == 5
    with pytest.raises(CorpusError, match=r"corpus c4.*shorter than a sequence.*calib\.pack=true"):
        draw(found, Split.calib, byte_tokenizer(), 5, 4096, 0, False, name="c4")
    filled.files["allenai/c4", "main"].pop(C4_VALIDATION)
    with pytest.raises(CorpusError, match=r"corpus c4: .*no file"):
        draw(corpus("calib=c4"), Split.calib, byte_tokenizer(), 5, 64, 0, False, name="c4")


def test_max_documents_bounds_what_is_read(filled):
    assert len(texts(corpus("calib=c4", "calib.max_documents=7"))) == 7 + 2
    assert "first 7 documents" in corpus("calib=c4", "calib.max_documents=7").revision()
    assert "first" not in corpus("calib=c4", "calib.max_documents=null").revision()


def test_wikitext2(filled):
    found = corpus("calib=wikitext2")
    for split, name in ((Split.calib, "train"), (Split.heldout, "validation"), (Split.test, "test")):
        assert found.joined(split) == "\n\n".join(ARTICLES[name])
        documents = texts(found, split)
        assert len(documents) == len(ARTICLES[name]) // 6
        assert all(text.startswith("= Title") and text.count("= Title") == 1 and ODD in text for text in documents)
        assert documents == [text for text in documents if text in found.joined(split)]


def test_ptb(filled):
    found = corpus("calib=ptb")
    assert found.joined(Split.test, 3) == " ".join(f"test {words(n, 9)}" for n in range(3))
    for split, name in ((Split.calib, "train"), (Split.heldout, "validation"), (Split.test, "test")):
        documents = texts(found, split)
        assert " ".join(documents) == " ".join(f"{name} {words(n, 9)}" for n in range(900))
        assert all(len(text) >= 20000 for text in documents[:-1])
        assert len(documents) > 1
    assert "ptb-text-only/ptb_text_only@" in found.revision()


def test_any_data_set(hub):
    content = parquet([ODD, "", GERMAN, "x" * 300_000], "body")
    hub.add("me/mine", {"fancy/all/0000.parquet": content}, "refs/convert/parquet")
    splits = "calib.splits={calib: all, heldout: all, test: all}"
    found = corpus("calib=hub", "calib.path=me/mine", "calib.subset=fancy", splits, "calib.text_field=body")
    assert texts(found) == [ODD, GERMAN, "x" * 300_000]
    assert {item.split for item in found.documents()} <= set(Split)
    assert all(item.split is split_of(item.id) for item in found.documents())


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"])
def test_every_kind_of_file(hub, name):
    rows = [ODD, GERMAN, "third"]
    stream = io.BytesIO()
    table = pyarrow.table({"text": rows})
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    contents = {
        "a.txt": "\n".join(rows).encode(),
        "a.jsonl": gzip.decompress(json_gz(rows)),
        "a.jsonl.gz": json_gz(rows),
        "a.parquet": parquet(rows),
        "a.arrow": stream.getvalue(),
    }
    hub.add("me/mine", {name: contents[name]})
    mine = ["calib=hub", "calib.path=me/mine", "calib.hub_revision=main", f"calib.data_files={{train: {name}}}"]
    assert texts(corpus(*mine)) == rows
    assert texts(corpus(*mine, "calib.streaming=true")) == rows


@pytest.mark.parametrize("kind", ["json_gz", "parquet"])
def test_streaming_reads_no_more_than_it_needs(hub, kind, tmp_path):
    rows = [os.urandom(2000).hex() for _ in range(8000)]  # 32 MB that hardly compress
    name, content = ("a.jsonl.gz", json_gz(rows)) if kind == "json_gz" else ("a.parquet", parquet(rows))
    hub.add("me/mine", {name: content})
    mine = ["calib=hub", "calib.path=me/mine", "calib.hub_revision=main", f"calib.data_files={{train: {name}}}"]
    found = corpus(*mine, "calib.streaming=true", "calib.max_documents=20")
    assert texts(found) == rows[:20]
    assert hub.sent < len(content) * 0.8
    assert not (tmp_path / "hf" / "hub").exists()
    sent = hub.sent
    assert texts(found) == rows[:20]
    assert hub.sent == sent  # a run that draws from it three times reads it once
    assert f"me/mine@{hub.sha('me/mine', 'main')}" in found.revision()


@pytest.mark.parametrize("option", ["c4", "wikitext2", "ptb"])
@pytest.mark.parametrize("how", ["offline", "unreachable"])
def test_what_is_cached_works_without_network(filled, monkeypatch, caplog, option, how):
    online = corpus(f"calib={option}")
    documents, revision = list(online.documents()), online.revision()
    cut(monkeypatch, how)
    filled.asked.clear()
    found = corpus(f"calib={option}")
    assert list(found.documents()) == documents
    assert found.revision() == revision
    assert not filled.asked
    # Said where nobody asked for it; with HF_HUB_OFFLINE somebody did.
    assert ("the hub cannot be reached" in caplog.text) == (how == "unreachable")


def cut(monkeypatch, how):
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", dead)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", dead + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.mark.parametrize("how", ["offline", "unreachable"])
@pytest.mark.parametrize("streaming", ["true", "false"])
def test_what_is_not_cached_fails_at_once(hub, monkeypatch, how, streaming):
    cut(monkeypatch, how)
    begin = time.perf_counter()
    with pytest.raises(CorpusError) as caught:
        corpus("calib=c4", f"calib.streaming={streaming}").revision()
    assert time.perf_counter() - begin < 3
    for part in ("allenai/c4", "the hub cannot be reached", "calib=local calib.paths=", "calib=sotu"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_new_commit_is_seen_and_an_old_one_can_be_asked_for(filled):
    old = corpus("calib=wikitext2")
    old_text, old_sha = old.joined(Split.test), filled.sha("Salesforce/wikitext", "main")
    files = filled.files["Salesforce/wikitext", "main"]
    filled.files["Salesforce/wikitext", "v1"] = dict(files)
    files["wikitext-2-raw-v1/test-00000-of-00001.parquet"] = parquet(["another text"])
    new = corpus("calib=wikitext2")
    assert new.joined(Split.test) == "another text"
    assert old_sha not in new.revision()
    assert (
        corpus("calib=wikitext2", f"calib.hub_revision={filled.sha('Salesforce/wikitext', 'v1')}").joined(Split.test)
        == old_text
    )


def test_a_commit_works_without_network_once_it_is_cached(filled, monkeypatch):
    pinned = ["calib=wikitext2", f"calib.hub_revision={filled.sha('Salesforce/wikitext', 'main')}"]
    documents = texts(corpus(*pinned))
    cut(monkeypatch, "offline")
    assert texts(corpus(*pinned)) == documents


def test_a_data_set_that_changes_while_it_is_read(filled):
    found = corpus("calib=c4")
    assert filled.sha("allenai/c4", "main") in found.revision()
    filled.files["allenai/c4", "main"][C4_TRAIN] = json_gz(["other"])
    with pytest.raises(CorpusError, match=r"allenai/c4: was changed on the hub while it was read"):
        texts(found)


def test_what_the_hub_does_not_have(filled):
    with pytest.raises(CorpusError, match=r"path=no/such: the hub has no such data set.*calib=local"):
        corpus("calib=c4", "calib.path=no/such").revision()
    with pytest.raises(CorpusError, match=r"path=no--such: the hub has no such data set"):
        corpus("calib=c4", "calib.path=no--such").revision()
    with pytest.raises(CorpusError, match="hub_revision=v9: data set allenai/c4 has no such branch"):
        corpus("calib=c4", "calib.hub_revision=v9").revision()
    for streaming in ("true", "false"):
        with pytest.raises(
            CorpusError, match=r"no file en/none\.jsonl at hub_revision=main.*There are: .*c4-validation"
        ):
            texts(corpus("calib=c4", "calib.data_files.train=en/none.jsonl", f"calib.streaming={streaming}"))
    with pytest.raises(CorpusError, match=r"penn_treebank/nope/0000.parquet .*There are: penn_treebank/train"):
        texts(corpus("calib=ptb", "calib.splits.test=nope"))


def test_a_data_set_behind_a_login(filled):
    filled.gated.add("allenai/c4")
    with pytest.raises(CorpusError, match=r"path=allenai/c4: .*not open to you.*hf auth login"):
        texts(corpus("calib=c4"))


def test_rows_that_are_not_as_expected(filled):
    with pytest.raises(
        CorpusError, match=rf"allenai/c4/{C4_TRAIN}:1: has no field 'body'; it has text, url.*text_field"
    ):
        texts(corpus("calib=c4", "calib.text_field=body"))
    with pytest.raises(CorpusError, match=r"0000\.parquet: has no field 'text'; it has sentence"):
        texts(corpus("calib=ptb", "calib.text_field=text"))
    filled.files["allenai/c4", "main"][C4_TRAIN] = json_gz([words(1)] * 1000)[:-20]
    with pytest.raises(CorpusError, match=rf"allenai/c4/{C4_TRAIN}: is cut off"):
        texts(corpus("calib=c4"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["calib=c4", "calib.path=a b"], "calib.path=a b: must be a data set"),
        (["calib=c4", "calib.max_documents=0"], "calib.max_documents=0: must be at least 1"),
        (["calib=c4", "calib.splits.test=nope"], "must give a file or a list of files for nope"),
        (["calib=c4", "~calib.splits.test"], "must name a split of the data set for each of calib, heldout, test"),
        (["calib=c4", "calib.data_files.train=en/*.csv"], "unknown kind of file"),
        (["calib=c4", "calib.data_files=null"], "subset must be set"),
        (["calib=c4", "calib.chunk_chars=-1"], "calib.chunk_chars=-1: must be at least 0"),
        (["calib=wikitext2", "calib.chunk_chars=9"], "begin is set too"),
        (["calib=wikitext2", "calib.begin='('"], "is not a regular expression"),
        (["calib=hub"], "calib.path: must be set"),
        (["calib=sotu", "heldout=[{c4: {max_documents: 0}}]"], "heldout.c4.max_documents=0: must be"),
    ],
)
def test_settings_out_of_range(overrides, message):
    with pytest.raises(ConfigError) as caught:
        corpus(*overrides)
    assert message in str(caught.value)


def test_runs_on_the_hub_and_then_on_its_cache(filled, tmp_path):
    """A whole run in its own process, as a user starts it; then again without network: the same numbers."""
    small = ["calib.count=6", "calib.seq_len=64", "calib.heldout_count=2", "eval.ppl.seq_len=64", "eval.ppl.windows=2"]
    command = [sys.executable, str(ROOT / "run.py"), "model=tiny", "calib=wikitext2", "heldout=[wikitext2,c4,ptb]"]
    filled.files["allenai/c4", "main"][C4_VALIDATION] = json_gz([words(n) for n in range(500, 520)])
    env = os.environ | {
        "HF_ENDPOINT": filled.url,
        "HF_HOME": str(tmp_path / "home"),
        "REPRUNE_CACHE": str(tmp_path / "cache"),
        "WANDB_MODE": "disabled",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "no_proxy": "127.0.0.1",
    }
    env.pop("HF_HUB_OFFLINE", None)
    metrics = {}
    for name, offline in (("first", {}), ("second", {"HF_HUB_OFFLINE": "1"})):
        done = subprocess.run(
            [*command, *small, f"hydra.run.dir={tmp_path / name}"],
            env=env | offline, cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads((tmp_path / name / "metrics.json").read_text())
        moving = {"seconds", "walk_seconds", "peak_memory_bytes"}
        metrics[name] = {key: value for key, value in found.items() if key not in moving}
        written = json.loads((tmp_path / name / "calib.json").read_text())
        assert written["calib"][0]["corpus"] == "wikitext2"
        assert written["heldout"]["c4"]["revision"].startswith(f"allenai/c4@{filled.sha('allenai/c4', 'main')}")
    assert {"ppl/wikitext2", "ppl/c4", "ppl/ptb", "error/c4/1"} <= metrics["first"].keys()
    assert metrics["first"] == metrics["second"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data is not there")
def test_articles_of_the_real_wikitext2(hub):
    read = {
        name: [json.loads(line)["text"] for line in (SHARED / "wikitext2" / name).open()] for name in ("test.jsonl",)
    }
    rows = read["test.jsonl"]
    pages = [json.loads(line)["page"] for line in (SHARED / "wikitext2" / "pages_test.jsonl").open()]
    hub.add(
        "Salesforce/wikitext",
        {f"wikitext-2-raw-v1/{name}-00000-of-00001.parquet": parquet(rows) for name in ("train", "validation", "test")},
    )
    found = corpus("calib=wikitext2")
    documents = texts(found)
    assert len(documents) == len(pages) == 62
    assert [" ".join(text.split()) for text in documents] == [" ".join(page.split()) for page in pages]
    assert found.joined(Split.test) == "\n\n".join(rows)
