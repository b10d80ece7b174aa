import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from markupsafe import escape

from reprune.errors import CorpusError
from reprune.pipeline import run
from reprune.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["calib.count=6", "calib.seq_len=64", "calib.heldout_count=2", "eval.ppl.seq_len=64", "eval.ppl.windows=3"]


@pytest.fixture(scope="session")
def run_at(tmp_path_factory):
    """(folder, overrides) -> the finished `python run.py`, started in a folder that is not the repository."""
    # An empty cache and a proxy that nothing answers: whatever wants the network or an asset fails.
    nowhere = {"REPRUNE_CACHE": str(tmp_path_factory.mktemp("cache")), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    path = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def start(folder, *overrides, wait=True):
        command = [sys.executable, str(ROOT / "run.py"), *overrides]
        env = os.environ | nowhere | dead | path
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if not wait:
            return process
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return start


@pytest.fixture(scope="session")
def here(tmp_path_factory, text_file):
    """A working directory with the text file in it, under a relative name."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "text.txt").write_bytes(text_file.read_bytes())
    return folder


LOCAL = ["model=tiny", "calib=local", "calib.paths=text.txt", "heldout=[local]", *SMALL]


@pytest.fixture(scope="session")
def finished(run_at, here):
    """One whole run: what it printed and its directory."""
    done = run_at(here, *LOCAL, "hydra.run.dir=out")
    assert done.returncode == 0, done.stdout + done.stderr
    return done, here / "out"


def test_a_run_leaves_a_complete_directory(finished):
    _, path = finished
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    expected = {"config.resolved.yaml", "environment.json", "calib.json", "blocks.jsonl", "metrics.json", "run.log"}
    assert expected | {"report.html", ".hydra/overrides.yaml"} <= names
    assert any(name.startswith("plots/") for name in names)
    assert not any(name.endswith(".tmp") for name in names)


def test_metrics(finished):
    metrics = json.loads((finished[1] / "metrics.json").read_text())
    alone = {"ppl_dense", "ppl_dense_stderr", "bits_per_byte_dense", "tokens_dense"}
    evaluated = alone | {"ppl", "ppl_stderr", "bits_per_byte", "tokens", "kl", "kl_stderr", "agreement"}
    by_part = ("kl_by_position", "agreement_by_position", "kl_by_entropy", "agreement_by_entropy", "entropy_dense")
    rest_by_part = {f"{name}/local/{part}" for name in by_part for part in (1, 2, 3, 4)}
    errors = {
        f"{kind}/{corpus}/{block}"
        for kind in ("error", "mse", "mse_typical", "token_share")
        for corpus in ("calib", "local")
        for block in (0, 1)
    }
    rest = {"sparsity", "walk_seconds", "seconds", "peak_memory_bytes"}
    assert metrics.keys() == {f"{name}/local" for name in evaluated} | rest_by_part | errors | rest
    assert metrics["sparsity"] == pytest.approx(0.5, abs=0.01)
    assert metrics["tokens/local"] == 3 * 63
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_blocks(finished):
    metrics = json.loads((finished[1] / "metrics.json").read_text())
    blocks = RunDir(finished[1]).read_blocks()
    assert [block["block"] for block in blocks] == [0, 1]
    for block in blocks:
        assert block["after"].keys() == block["before"].keys() == {"calib", "local"}
        assert len(block["linears"]) == 7
        assert len(block["fits"]) == 1
        for corpus, error in block["after"].items():
            assert metrics[f"error/{corpus}/{block['block']}"] == error["relative"]


def test_the_draws_are_written_down(finished):
    drawn = json.loads((finished[1] / "calib.json").read_text())
    assert drawn.keys() == {"calib", "heldout", "eval", "left_out", "shared"}
    (calib,) = drawn["calib"]
    assert calib["use"] == ["mask", "recon"]
    heldout, test = drawn["heldout"]["local"], drawn["eval"]["ppl"]["local"]
    assert [item["split"] for item in (calib, heldout, test)] == ["calib", "heldout", "test"]
    assert [item["count"] for item in (calib, heldout, test)] == [6, 2, 3]
    used = [{piece["document"] for row in item["sequences"] for piece in row} for item in (calib, heldout, test)]
    assert len(set.union(*used)) == sum(map(len, used))  # no document is in two splits


def test_what_a_run_prints(finished):
    done, path = finished
    for word in ("model", "sparsity", "plan", "dense ppl", "pruned ppl", "out"):
        assert word in done.stdout
    assert done.stderr == ""
    log = (path / "run.log").read_text()
    assert "plan" in log
    assert "Traceback" not in log
    assert json.loads((path / "environment.json").read_text())["device"] == "cpu"


def test_the_config_holds_every_setting(finished):
    config = yaml.safe_load((finished[1] / "config.resolved.yaml").read_text())
    assert config["run_name"] == "tiny-sparsegpt-gp-local"
    assert config["calib"]["count"] == 6
    assert "${" not in (finished[1] / "config.resolved.yaml").read_text()
    assert "???" not in (finished[1] / "config.resolved.yaml").read_text()


def test_a_run_with_a_published_protocol_alone(plan_of, text_file, tmp_path):
    settings = [f"eval.wikitext2.path={text_file}", "eval.wikitext2.seq_len=64", "eval.wikitext2.max_windows=3"]
    metrics = run(plan_of([*SMALL[:3], "eval=[wikitext2]", *settings]), tmp_path / "out")
    assert metrics["ppl/wikitext2-64"] > 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{metrics['ppl/wikitext2-64']:.3f}" in page
    assert "Other scores" in page


def test_a_sweep_makes_a_folder_for_each_cell(run_at, here, finished):
    done = run_at(here, "-m", *LOCAL, "recon=none,gp", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stdout + done.stderr
    cells = sorted(path.name for path in (here / "sweep").iterdir() if path.is_dir())
    assert cells == ["0-tiny-sparsegpt-none-local", "1-tiny-sparsegpt-gp-local"]
    none, gp = (json.loads((here / "sweep" / cell / "metrics.json").read_text()) for cell in cells)
    assert gp["error/calib/1"] < none["error/calib/1"]
    # The second cell is the run above: the same seed gives the same numbers, in a sweep or not.
    alone = json.loads((finished[1] / "metrics.json").read_text())
    moving = {"seconds", "walk_seconds", "peak_memory_bytes"}
    assert {k: v for k, v in gp.items() if k not in moving} == {k: v for k, v in alone.items() if k not in moving}


def test_a_dry_run_stops_before_weights(run_at, here):
    done = run_at(here, *LOCAL, "dry_run=true", "hydra.run.dir=dry")
    assert done.returncode == 0, done.stderr
    assert "plan" in done.stdout
    assert (here / "dry" / "config.resolved.yaml").exists()
    assert not (here / "dry" / "blocks.jsonl").exists()
    assert not (here / "dry" / "metrics.json").exists()


def test_a_mistyped_setting(run_at, here):
    done = run_at(here, *LOCAL, "sead=1", "hydra.run.dir=mistyped")
    assert done.returncode == 2
    assert "sead: no such setting. Did you mean seed" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert not (here / "mistyped" / "blocks.jsonl").exists()


FILES = {
    "latin.txt": ("Se\u00f1or\n".encode("latin-1"), "latin.txt:1: not UTF-8"),
    "empty.txt": (b"", "empty.txt: has no text in it"),
    "missing.txt": (None, "missing.txt: there is no such file"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used(plan_of, tmp_path, name):
    content, message = FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    plan = plan_of([f"calib.paths={tmp_path / name}"])
    with pytest.raises(CorpusError, match="Stopped while drawing text: .*" + re.escape(message)):
        run(plan, tmp_path / "out")  # in this process, to be quick; how errors reach the terminal is tested below
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_too_little_text(run_at, here):
    done = run_at(here, *LOCAL, "calib.count=5000", "hydra.run.dir=little")
    assert done.returncode == 1
    assert "calib.count=5000, calib.seq_len=64: 320000 tokens are asked of corpus local" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_full_disk(run_at, here):
    full = Path("/dev/full")  # every write to it fails as on a full disk
    if not full.exists():
        pytest.skip("no /dev/full here")
    (here / "full").mkdir()
    (here / "full" / "blocks.jsonl").symlink_to(full)
    done = run_at(here, *LOCAL, "hydra.run.dir=full")
    assert done.returncode == 1
    assert "Stopped in block 0: " in done.stderr
    assert "blocks.jsonl: cannot be written (No space left on device). Free some space" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert (here / "full" / "calib.json").exists()  # what was written before stays
    assert not (here / "full" / "metrics.json").exists()


def test_a_log_on_a_full_disk(run_at, here):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    (here / "fullog").mkdir()
    (here / "fullog" / "run.log").symlink_to(full)
    done = run_at(here, *LOCAL, "hydra.run.dir=fullog")
    assert done.returncode == 1
    assert "run.log: cannot be written (No space left on device)" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_folder_that_cannot_be_made(run_at, here):
    done = run_at(here, *LOCAL, "hydra.run.dir=text.txt/out")
    assert done.returncode == 1
    assert "text.txt/out" in done.stderr
    assert "Not a directory" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_control_c_keeps_finished_blocks(run_at, here):
    slow = ["model.num_blocks=60", "recon.epochs=40", "hydra.run.dir=stopped"]
    process = run_at(here, *LOCAL, *slow, wait=False)
    blocks = here / "stopped" / "blocks.jsonl"
    deadline = time.monotonic() + 90
    while not (blocks.exists() and blocks.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    kept = RunDir(here / "stopped").read_blocks()
    assert [block["block"] for block in kept] == list(range(len(kept)))
    assert f"{len(kept)} finished blocks are kept in" in out
    assert "Stopped in block" in out
    assert "Traceback" not in out + err
    assert not (here / "stopped" / "metrics.json").exists()


def test_a_run_that_dies_says_where_and_keeps_its_blocks(plan_of, tmp_path, monkeypatch):
    plan = plan_of([*SMALL, "model.num_blocks=3", "pruner=wanda"])
    prune, calls = type(plan.pruner).prune, []

    def dying(*args):
        calls.append(args)
        if len(calls) > 14:  # seven linears a block
            raise RuntimeError("the device is gone")
        return prune(*args)

    monkeypatch.setattr(type(plan.pruner), "prune", dying)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(plan, tmp_path / "out")
    log = (tmp_path / "out" / "run.log").read_text()
    assert "Stopped in block 2: the device is gone" in log
    assert "2 finished blocks are kept" in log
    assert [block["block"] for block in RunDir(tmp_path / "out").read_blocks()] == [0, 1]


@pytest.mark.slow
def test_the_main_job_on_the_real_model(tmp_path):
    """The README's command, on the assets; needs the package index or a filled REPRUNE_CACHE, and some minutes."""
    env = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
    small = ["calib.count=8", "eval.ppl.windows=4"]
    rows = {}
    for recon in ("none", "gp"):
        command = [sys.executable, str(ROOT / "run.py"), f"recon={recon}", *small, f"hydra.run.dir={recon}"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        rows[recon] = json.loads((tmp_path / recon / "metrics.json").read_text())
    for corpus in ("sotu", "wiki"):
        assert 15 < rows["gp"][f"ppl_dense/{corpus}"] < 45
        assert rows["gp"][f"ppl/{corpus}"] < rows["none"][f"ppl/{corpus}"]
        assert rows["gp"][f"error/{corpus}/29"] < rows["none"][f"error/{corpus}/29"]
    assert rows["gp"]["sparsity"] == pytest.approx(0.5, abs=1e-4)


GENERATED = [
    "calib.base={local:{paths:text.txt}}",
    "calib.generated_count=2",
    "calib.max_length=40",
    "calib.min_length=4",
]
FREE = ["calib.start_languages=null", "calib.languages=null"]
SELFGEN = [
    "model=tiny",
    "calib=selfgen",
    "heldout=[{local:{paths:text.txt}}]",
    *SMALL,
    *GENERATED,
    "calib.min_length=4",
]


@pytest.fixture(scope="session")
def twice(run_at, here):
    """Two runs at once that need the same text of the model."""
    with ThreadPoolExecutor(2) as pool:
        pair = list(pool.map(lambda name: run_at(here, *SELFGEN, *FREE, f"hydra.run.dir={name}"), ("self0", "self1")))
    assert [done.returncode for done in pair] == [0, 0], pair
    return pair, [here / "self0", here / "self1"]


def test_generated_text_is_used_and_shown(twice):
    (done, _), (path, _) = twice
    assert "6 local + 2 selfgen that the model writes first for recon only" in done.stdout
    local, generated = json.loads((path / "calib.json").read_text())["calib"]
    assert (local["use"], local["count"]) == (["mask", "recon"], 6)
    assert (generated["use"], generated["count"], generated["corpus"]) == (["recon"], 2, "selfgen")
    told = generated["generated"]
    assert generated["revision"] == f"generated:{told['key']}"
    metrics = json.loads((path / "metrics.json").read_text())
    assert metrics["generated/accept_rate"] == told["accept_rate"]
    assert metrics["generated/tokens"] == told["tokens"] >= 128
    page = (path / "report.html").read_text()
    for sample in told["samples"]:
        assert escape(sample.splitlines()[0].strip()) in page


def test_two_runs_at_once_generate_once(twice):
    pair, paths = twice
    assert sorted("from the cache" in done.stdout for done in pair) == [False, True]
    one, two = (json.loads((path / "calib.json").read_text()) for path in paths)
    assert one == two


def test_text_in_no_language(run_at, here):
    done = run_at(here, *SELFGEN, "calib.tries=2", "hydra.run.dir=babble")
    assert done.returncode == 1
    assert "language of the start. Try calib.start_languages=null" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (here / "babble" / "metrics.json").exists()


def test_a_dry_run_says_that_text_will_be_written(run_at, here):
    done = run_at(here, *SELFGEN, "dry_run=true", "hydra.run.dir=drier")
    assert done.returncode == 0, done.stderr
    assert "selfgen that the model writes first" in done.stdout


def test_the_draws_preset_is_a_sweep(run_at, here):
    done = run_at(here, *LOCAL, "experiment=draws", "calib.draw=0,1", "hydra.sweep.dir=draws")
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [json.loads(path.read_text()) for path in (here / "draws").glob("*/calib.json")]
    used = [{piece["document"] for row in cell["calib"][0]["sequences"] for piece in row} for cell in cells]
    assert len(used) == 2
    assert not used[0] & used[1]
