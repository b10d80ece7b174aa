import sys

import pytest

from reprune.calib import __main__ as show

SMALL = ["calib.count=5", "calib.seq_len=64", "calib.heldout_count=2", "eval=[]"]


@pytest.fixture
def shown(monkeypatch, capsys, tmp_path):
    """(overrides) -> what `python -m reprune.calib` prints for the tiny model."""
    monkeypatch.setenv("REPRUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def make(*overrides):
        monkeypatch.setattr(sys, "argv", ["reprune.calib", "model=tiny", *SMALL, *overrides])
        show.main()
        return capsys.readouterr().out

    return make


def test_a_draw_is_shown_and_nothing_is_written(shown, text_file, tmp_path):
    out = shown("calib=local", f"calib.paths={text_file}", "heldout=[local]")
    assert "0-4       local       mask recon" in out
    assert "64 to 64, median 64" in out
    assert out.count("--- row ") == 3
    assert "Note: calibration and held-out text are both from local" in out
    assert not list(tmp_path.iterdir())


def test_generated_text_is_shown(shown, text_file):
    base = [f"calib.base={{local:{{paths:{text_file}}}}}", "heldout=[]", "calib.generated_count=3"]
    free = ["calib.start_languages=null", "calib.languages=null", "calib.max_length=40", "calib.min_length=4"]
    out = shown("calib=selfgen", *base, *free)
    assert "5-7       selfgen     recon" in out
    assert "generated: " in out
    assert "written in" in out
    assert "from the cache" in shown("calib=selfgen", *base, *free)


def test_a_mistake_is_one_clear_message(shown):
    with pytest.raises(Exception, match="nosuch"):
        shown("calib=nosuch")
