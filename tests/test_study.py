import csv
import json

import pytest
import yaml

from reprune.errors import RepruneError
from reprune.pipeline import run
from reprune.study import Run, as_csv, collect, main, over_draws, table

SMALL = ["calib.count=4", "calib.seq_len=64", "calib.heldout_count=2", "eval.ppl.seq_len=64", "eval.ppl.windows=3"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture
def runs(study, plan_of):
    """Two finished runs, as a sweep leaves them, and one that died."""
    if not any(study.iterdir()):
        for number, recon in enumerate(("none", "gp")):
            folder = study / f"{number}-tiny-sparsegpt-{recon}-local"
            run(plan_of([*SMALL, f"recon={recon}"]), folder)
            choices = {"model": "tiny", "calib": "local", "sparsity": "uniform", "pruner": "sparsegpt", "recon": recon}
            (folder / ".hydra").mkdir()
            (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
            (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([f"recon={recon}", "calib.count=4"]))
        (study / "2-dead").mkdir()
        (study / "2-dead" / "config.resolved.yaml").write_text("seed: 0\n")
    return study


def test_a_row_for_each_finished_run(runs):
    found, unfinished = collect([str(runs / "*")])
    assert [item.choices["recon"] for item in found] == ["none", "gp"]
    assert [path.name for path in unfinished] == ["2-dead"]
    rows = table(found)
    for row, item in zip(rows, found, strict=True):
        metrics = json.loads((item.path / "metrics.json").read_text())
        assert row["ppl/local"] == metrics["ppl/local"]
        assert row["error/calib/last"] == metrics["error/calib/1"]
        assert row["calib.count"] == "4"
        assert "error/calib/0" not in row
    read = list(csv.DictReader(as_csv(rows).splitlines()))
    assert [float(row["ppl/local"]) for row in read] == [row["ppl/local"] for row in rows]


def test_runs_with_different_evaluations(runs):
    found, _ = collect([str(runs / "*")])
    del found[1].metrics["ppl/local"], found[1].metrics["kl/local"]
    found[1].metrics["acc/piqa"] = 0.5
    rows = list(csv.DictReader(as_csv(table(found)).splitlines()))
    assert rows[0]["acc/piqa"] == "" == rows[1]["ppl/local"]


def test_draws_are_averaged(runs):
    found, _ = collect([str(runs / "*")])
    assert over_draws(found) == []  # two cells, one run each
    draws = [
        Run(run.path, run.choices, run.settings | {"calib.draw": str(draw)}, run.metrics | {"ppl/local": ppl})
        for run in found
        for draw, ppl in enumerate((10.0, 12.0, 17.0))
    ]
    rows = over_draws(draws)
    assert [row["recon"] for row in rows] == ["none", "gp"]
    for row in rows:
        assert row["runs"] == 3
        assert row["ppl/local"] == pytest.approx(13.0)
        assert row["ppl/local_sd"] == pytest.approx(13**0.5)
        assert row["error/calib/last_sd"] == 0


def test_the_command_writes_table_and_figures(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report", str(runs / "*"), "--to", str(tmp_path)])
    main()
    assert {path.name for path in tmp_path.iterdir()} == {"study.csv", "error_perplexity.png", "calib_heldout.png"}
    said = capsys.readouterr().out
    assert said.startswith("2 runs in ")
    assert "not finished" in said
    assert "2-dead" in said


def test_nothing_to_show(tmp_path, monkeypatch):
    with pytest.raises(RepruneError, match="there is no run directory"):
        collect([str(tmp_path / "*")])
