import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from reprune.calib.local import Local
from reprune.errors import ConfigError, CorpusError

SHARED = Path(os.environ.get("REPRUNE_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
# Characters that str.splitlines() takes for line ends, a NUL, and one outside of the basic plane.
ODD = "a\u2028b\u0085c\x0bd\x0ce\x1cf\x00g\U0001f600h\ri"


def local(*paths, text_field="text", chunk_chars=10, pack=True) -> Local:
    return Local(paths=[str(path) for path in paths], text_field=text_field, chunk_chars=chunk_chars, pack=pack)


def texts(*paths, **settings) -> list[str]:
    return [document.text for document in local(*paths, **settings).documents()]


def jsonl(*rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_arrow(path, rows, new):
    """Write rows in batches of two."""
    table = pyarrow.table({"id": list(range(len(rows))), "text": rows})
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def test_every_format_gives_the_same_documents(tmp_path):
    wanted = [ODD, "second text", "dritter Text: äöü"]
    rows = [{"text": text, "id": number} for number, text in enumerate(wanted)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(*rows))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(*rows)))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(jsonl(*rows)))  # as C4's own files are called
    pyarrow.parquet.write_table(pyarrow.table({"text": wanted}), tmp_path / "c.parquet")
    write_arrow(tmp_path / "d.arrow", wanted, pyarrow.ipc.new_stream)
    write_arrow(tmp_path / "e.arrow", wanted, pyarrow.ipc.new_file)
    for file in ("a.jsonl", "b.jsonl.gz", "b.json.gz", "c.parquet", "d.arrow", "e.arrow"):
        assert texts(tmp_path / file) == wanted
    assert texts(tmp_path) == wanted  # the same text in six files is one document


def test_raw_line_separators_of_unicode_stay_in_a_line_of_json(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"text": "a\u2028b\u0085c"}\r\n\r\n{"text": "d"}'.encode())
    assert texts(tmp_path / "a.jsonl") == ["a\u2028b\u0085c", "d"]


def test_txt_is_cut_at_blank_lines_into_pieces_that_are_long_enough(tmp_path):
    paragraphs = [f"paragraph {number} " + "x" * (1 + 7 * number % 40) for number in range(50)]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    for size in (1, 30, 100, 500):
        found = texts(tmp_path / "a.txt", chunk_chars=size)
        assert "\n\n".join(found) == "\n\n".join(paragraphs)
        assert all(len(text) >= size for text in found)
        assert len(found) >= len("\n\n".join(paragraphs)) // (size + 60) or size == 1
    assert len(texts(tmp_path / "a.txt", chunk_chars=1)) == 50
    assert len(texts(tmp_path / "a.txt", chunk_chars=10**6)) == 1


def test_txt_with_windows_line_ends_and_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone one one\r\n\r\ntwo\r\ntwo two\r\n \t\r\n\r\nthree three")
    assert texts(tmp_path / "a.txt") == ["one one one", "two\r\ntwo two", "three three"]


def test_odd_characters_survive_in_txt(tmp_path):
    (tmp_path / "a.txt").write_bytes(ODD.encode())
    assert texts(tmp_path / "a.txt", chunk_chars=1) == [ODD]


def test_ids_and_revision_do_not_depend_on_names(tmp_path):
    for folder, names in (("x", ("1.jsonl", "2.jsonl")), ("y", ("b.jsonl", "a.jsonl"))):
        (tmp_path / folder).mkdir()
        for name, text in zip(names, ("first", "second"), strict=True):
            (tmp_path / folder / name).write_bytes(jsonl({"text": text}))
    one, two = local(tmp_path / "x"), local(tmp_path / "y")
    assert {d.id: d.text for d in one.documents()} == {d.id: d.text for d in two.documents()}
    assert one.revision() == two.revision()
    (tmp_path / "y" / "a.jsonl").write_bytes(jsonl({"text": "third"}))
    assert one.revision() != two.revision()


def test_paths(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    for name in ("a[1].jsonl", "b.jsonl", "deep/c.jsonl"):
        (tmp_path / name).write_bytes(jsonl({"text": name}))
    (tmp_path / "README.md").write_text("not text to read")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sorted(texts(".")) == ["a[1].jsonl", "b.jsonl", "deep/c.jsonl"]
    assert texts("*.jsonl") == ["a[1].jsonl", "b.jsonl"]
    assert texts("**/c.jsonl") == ["deep/c.jsonl"]
    assert texts("a[1].jsonl") == ["a[1].jsonl"]
    assert texts("~/b.jsonl", "b.jsonl") == ["b.jsonl"]
    assert Local(paths="b.jsonl", text_field="text", chunk_chars=10, pack=True).files() == local("b.jsonl").files()


@pytest.mark.parametrize("paths", ["a.txt", ["a.txt", "b.txt"]])
def test_settings_work_as_a_schema(paths):
    merged = OmegaConf.merge(
        OmegaConf.structured(Local), {"paths": paths, "text_field": "t", "chunk_chars": 1, "pack": True}
    )
    assert OmegaConf.to_object(merged) == Local(paths=paths, text_field="t", chunk_chars=1, pack=True)


@pytest.mark.parametrize("paths", [[], "", None, 3, ["a", 3]])
def test_paths_that_are_none(paths):
    with pytest.raises(ConfigError, match=r"^paths="):
        Local(paths=paths, text_field="text", chunk_chars=1, pack=True)


def test_chunk_chars_out_of_range():
    with pytest.raises(ConfigError, match="chunk_chars=0"):
        local("a", chunk_chars=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2: not a line of JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "x", "id": 1}\n', r"a\.jsonl:2: has no field 'text'; it has body, id"),
        ("a.jsonl", b'["x"]\n', r"a\.jsonl:1: is a list"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: field 'text' is a int"),
        ("a.jsonl", b'{"text": "\\ud83d x"}\n', r"a\.jsonl:1: .*lone surrogate"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}\n', r"a\.jsonl:2: not UTF-8 \(byte 14 of the line is 0xe9"),
        ("a.jsonl", b'{"text": " "}\n', "no text in it"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not a line of JSON"),
        ("a.txt", b"first\n\ncaf\xe9 au lait", r"a\.txt:3: not UTF-8 \(byte 4 of the line is 0xe9.*iconv"),
        ("a.txt", "UTF-16".encode("utf-16"), r"a\.txt:1: not UTF-8 \(byte 1 "),
        ("a.txt", b"", "no text in it"),
        ("a.txt", b" \n\n \n", "no text in it"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 1000)[:-20], "cut off or not a gzip file"),
        ("a.jsonl.gz", b'{"text": "x"}\n', "cut off or not a gzip file"),
        ("a.parquet", b"PAR1 nonsense", "cannot be read as parquet"),
        (
            "a.csv",
            b"text\nx\n",
            r"unknown kind of file. Supported: .txt, .jsonl, .jsonl.gz, .json.gz, .parquet, .arrow",
        ),
    ],
)
def test_files_that_cannot_be_read(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        texts(tmp_path / name)


def test_parquet_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match="has no field 'text'; it has body, id"):
        texts(tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match="column 'id' is int64"):
        texts(tmp_path / "a.parquet", text_field="id")
    assert texts(tmp_path / "a.parquet", text_field="body") == ["x"]


@pytest.mark.parametrize("new", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_arrow_files_that_cannot_be_read(tmp_path, new):
    path = tmp_path / "a.arrow"
    write_arrow(path, ["x" * 1000] * 10, new)
    with pytest.raises(CorpusError, match=r"a\.arrow: has no field 'body'; it has id, text"):
        texts(path, text_field="body")
    with pytest.raises(CorpusError, match=r"a\.arrow: column 'id' is int64"):
        texts(path, text_field="id")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"nonsense", b""):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=r"a\.arrow: cannot be read as arrow|no text in it"):
            texts(path)


def test_empty_rows_one_giant_document_and_another_language(tmp_path):
    giant = "слово " * 200_000
    (tmp_path / "a.jsonl").write_bytes(jsonl(*({"text": text} for text in ("", " ", giant, "日本語の文章", "\x00"))))
    assert texts(tmp_path / "a.jsonl") == [giant.strip(), "日本語の文章", "\x00"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data is not there")
def test_real_files():
    assert len(texts(SHARED / "c4" / "train.jsonl")) == 2000
    assert len(texts(SHARED / "wikitext2" / "pages_test.jsonl", text_field="page")) == 62
    assert "= Robert Boulter =" in texts(SHARED / "wikitext2" / "test.jsonl")


def test_nothing_there(tmp_path):
    with pytest.raises(CorpusError, match=r"^paths=.*none\.txt: there is no such file"):
        texts(tmp_path / "none.txt")
    with pytest.raises(CorpusError, match="there is no such file"):
        texts(tmp_path / "*.txt")
    with pytest.raises(CorpusError, match="holds no file of a supported kind"):
        texts(tmp_path)


@pytest.mark.parametrize("method", ["documents", "revision"])
def test_permission(method, tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("text")
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything

        def refuse(*args, **kwargs):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(CorpusError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        list(getattr(local(path), method)())
