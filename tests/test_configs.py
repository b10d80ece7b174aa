from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from reprune.cli import guard, load_option
from reprune.config import Plan, build_plan

CONF = Path(__file__).resolve().parents[1] / "conf"
OPTIONS = sorted((path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name != "hydra")
GROUPS = {group: sorted(name for other, name in OPTIONS if other == group) for group, _ in OPTIONS}


def test_every_folder_was_walked():
    assert len(OPTIONS) >= 23
    assert {"model", "calib", "sparsity", "pruner", "recon", "eval"} <= GROUPS.keys()
    assert {"none", "br", "gp", "cr", "decoupled"} <= set(GROUPS["recon"])
    assert {"magnitude", "wanda", "sparsegpt"} <= set(GROUPS["pruner"])
    assert not list(CONF.glob("*/*/*.yaml"))  # deeper ones would not be found


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_composes_and_builds(group, name, text_file):
    # Nothing is loaded: hub models and assets build without network.
    overrides = [f"{group}=[{name}]" if group == "eval" else f"{group}={name}", "run_name=test"]
    needed = {"local": [f"calib.paths={text_file}"], "hub": ["calib.path=owner/name"]}
    overrides += needed.get(name, []) if group == "calib" else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        plan = build_plan(compose("config", overrides=overrides), load_option)
    assert isinstance(plan, Plan)
    assert plan.resolved["seed"] == 0


def test_the_default_config_builds():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        plan = build_plan(compose("config", overrides=["run_name=test"]), load_option)
    assert (plan.calib, plan.heldout) == ("sotu", ["sotu", "wiki"])
    assert plan.evals["ppl"].corpora == ["sotu", "wiki"]


def test_resolved_settings_build_the_same_plan(plan_of, local):
    # The resolved config must stand alone: no option files, no interpolations.
    plan = plan_of(["recon=cr", "heldout=[local,wiki]"])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        again = build_plan(OmegaConf.create(plan.resolved), lambda *_: pytest.fail("an option was looked up"))
    assert again == plan


PRESETS = GROUPS["experiment"]


def test_every_preset_has_its_page():
    pages = {path.parent.name for path in (CONF.parent / "experiments").glob("*/README.md")}
    assert set(PRESETS) == pages
    assert len(PRESETS) >= 7
    for name in PRESETS:
        text = (CONF.parent / "experiments" / name / "README.md").read_text()
        assert f"python run.py experiment={name}" in text


@pytest.mark.parametrize("name", PRESETS)
def test_every_cell_of_a_preset_builds(name):
    preset = OmegaConf.load(CONF / "experiment" / f"{name}.yaml")
    assert preset.study == name
    params = preset.hydra.sweeper.params
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cells = BasicSweeper.split_arguments(
            OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()]), None
        )[0]
        assert len(cells) >= 2
        for cell in cells:
            config = compose("config", overrides=[f"experiment={name}", *cell, "run_name=test"])
            assert isinstance(build_plan(config, load_option), Plan)


@pytest.mark.parametrize("name", GROUPS["calib"])
def test_a_corpus_is_named_as_its_option(name):
    assert OmegaConf.load(CONF / "calib" / f"{name}.yaml").name == name


def test_corpora_of_one_class_have_two_names(plan_of, text_file):
    other = f"{{local: {{name: other, paths: {text_file}, chunk_chars: 9}}}}"
    plan = plan_of([f"heldout=[local,{other},c4]"])
    assert plan.heldout == plan.evals["ppl"].corpora == ["local", "other", "c4"]
    assert plan.calib == "local"
    assert [plan.corpora[name].chunk_chars for name in plan.heldout] == [4000, 9, 0]
    plan = plan_of(["calib.name=mine", f"heldout=[mine,{{local: {{paths: {text_file}}}}}]"])
    assert (plan.calib, plan.heldout) == ("mine", ["mine", "local"])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        again = build_plan(OmegaConf.create(plan.resolved), lambda *_: pytest.fail("an option was looked up"))
    assert again == plan


@pytest.fixture
def said(local, capsys):
    """(overrides) -> what the program says of them before it ends with the exit code of a wrong setting."""

    def make(overrides):
        def main():
            with initialize_config_dir(str(CONF), version_base="1.3"):
                build_plan(compose("config", overrides=[*local, *overrides]), load_option).check_length()

        with pytest.raises(SystemExit) as stopped:
            guard(main, CONF)
        text = capsys.readouterr().err
        assert stopped.value.code == 2, text
        assert "Traceback" not in text
        return text

    return make


MISTAKES = {
    "sparsity.ratio=1.0": "sparsity.ratio=1: removes everything",
    "sparsity.ratio=-0.1": "sparsity.ratio=-0.1: is negative",
    "sparsity.ratio=50": "not percent. Set sparsity.ratio=0.5.",
    "sparsity.ratio=nan": "sparsity.ratio=nan: not a number",
    "sparsity.ratio=half": "sparsity.ratio: Value 'half'",
    "sparsity.ratio=null": "sparsity.ratio=null with sparsity.pattern=unstructured",
    "sparsity.pattern=4:2": "sparsity.pattern=4:2: means at most 4 kept of every 2",
    "sparsity.pattern=0:4": "sparsity.pattern=0:4: keeps nothing",
    "sparsity.pattern=2/4": "sparsity.pattern=2/4: not a pattern",
    "sparsity.pattern=2:4 sparsity.ratio=0.7": "sparsity.ratio=0.7 with sparsity.pattern=2:4",
    "calib.count=0": "calib.count=0: must be at least 1",
    "calib.count=-3": "calib.count=-3: must be at least 1",
    "calib.count=many": "calib.count=many: must be a whole number",
    "calib.count=1.5": "calib.count=1.5: must be a whole number",
    "calib.count=true": "calib.count=True: must be a whole number",
    "calib.seq_len=1": "calib.seq_len=1: must be at least 2",
    "calib.seq_len=1025": "calib.seq_len=1025: a random Llama with 2 blocks of width 32 has 1024 positions",
    "eval.ppl.seq_len=4096": "eval.ppl.seq_len=4096: a random Llama with 2 blocks of width 32 has 1024 positions",
    "heldout=[{selfgen:{max_length:1025}}]": "selfgen.max_length=1025: a random Llama",
    "calib.heldout_count=0": "use heldout=[] to measure no held-out corpus",
    "calib=nosuch": "calib=nosuch: no such option. Options of calib: " + ", ".join(GROUPS["calib"]),
    "calib=wikki": "Did you mean wiki",
    "calib.paths=null": "calib.paths",
    "pruner=sparsgpt": "pruner=sparsgpt: no such option. Did you mean sparsegpt",
    "model=tinny": "Did you mean tiny",
    "recon=pg": "Options of recon:",
    "recon.learning_rate=abc": "recon.learning_rate: Value 'abc'",
    "recon.learning_rate=0": "recon.learning_rate=0.0: must be a positive number",
    "recon.learning_rate=inf": "recon.learning_rate=inf: must be a positive number",
    "recon.learning_rate=nan": "recon.learning_rate=nan: not a number",
    "recon.schedule=step": "recon.schedule: Invalid value 'step'",
    "stream_dtype=float16": "stream_dtype=float16: must be float32 or bfloat16",
    "recon.window=half": "recon.window=half: must be a number of blocks, or all",
    "recon.unit=submodule recon.window=2": "windows hold whole blocks",
    "recon.solver=least_squares": "only a linear has a closed form",
    "recon=lr recon.inputs=dense recon.target=dense": "recon.inputs=dense with least squares",
    "recon.unit=linear recon.keep_best=heldout": "held-out errors are those of whole blocks",
    "recon.patience=2 recon.keep_best=none": "recon.keep_best=none looks for none",
    "recon.anchor=-1": "must not be negative",
    "recon.window=0": "recon.window=0: must be at least 1",
    "recon.stride=2": "recon.stride=2: must be between 1 and recon.window=1",
    "recon.steps=10": "exactly one of them sets the length of training",
    "recon.epochs=null": "exactly one of them sets the length of training",
    "recon.warmup=1": "recon.warmup=1.0: is a fraction",
    "recon.beta1=1": "recon.beta1=1.0: must lie in [0, 1)",
    "recon=br recon.inputs=dense": "Use recon.target=dense",
    "calib.count=5 recon.batch_size=6": "recon.batch_size=6: reconstruction has only 5 sequences",
    "recon.batch_size=0": "recon.batch_size=0: must be at least 1",
    "recon.keep_best=heldout heldout=[] eval=[]": "recon.keep_best=heldout with heldout=[]",
    "heldout=[nosuch]": "nosuch: not a corpus. Options of calib: " + ", ".join(GROUPS["calib"]),
    "heldout=[wikki]": "Did you mean wiki",
    "heldout=wiki": "heldout=wiki: must be a list",
    "heldout=[wiki,wiki]": "a corpus is named twice",
    "batch_size=0": "batch_size=0: must be at least 1",
    "sead=1": "Did you mean seed",
    "prunner=wanda": "Did you mean pruner",
    "model.dtype=float8": "model.dtype: Invalid value 'float8'",
    "pruner._target_=os.system": "pruner._target_=os.system: must name a class of this package",
    "pruner._target_=reprune.pruner.wanda.Nosuch": "there is no such class",
    "sparsity.ratoi=0.5": "sparsity.ratoi: no such setting. Did you mean ratio",
    "recon.lerning_rate=1e-3": "Did you mean learning_rate",
    "eval.ppl.window=3": "Did you mean windows",
    "eval=[pppl]": "eval=pppl: no such option. Did you mean ppl",
    "calib.paths=[": "calib.paths=[: cannot be read",
    "calib.chunk_chars=0": "calib.chunk_chars=0: must be at least 1",
    "heldout=[{local:{paths:[]}}] calib.name=mine": "heldout.local.paths=[]: must be a file",
    "heldout=[{local:{paths:a}}]": "heldout: corpus local is set in two ways",
    "heldout=[{local:{paths:a,name:a/b}}]": "heldout: local.name=a/b: must be text without a slash",
    "calib.name=null": "calib.name=None: must be text",
    "+recon.nosuch=1": "recon.nosuch: no such setting",
}


@pytest.mark.parametrize("typed", ["seed=abc", "dry_run=perhaps", "batch_size=2.5", "heldout", "="])
def test_what_hydra_refuses_names_the_setting(said, typed):
    assert typed.split("=")[0] in said([typed])


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_gets_one_clear_message(said, typed):
    text = said(typed.split())
    assert MISTAKES[typed] in text
    assert len(text.strip().splitlines()) == 1


def test_every_contradiction_is_named_at_once(said):
    text = said(["calib.count=0", "batch_size=0", "calib.heldout_count=0"])
    assert [line.split("=")[0] for line in text.split("\n") if line] == [
        "calib.count",
        "calib.heldout_count",
        "batch_size",
    ]


def test_a_setting_that_must_be_given(capsys):
    def main():
        with initialize_config_dir(str(CONF), version_base="1.3"):
            build_plan(compose("config", overrides=["calib=local", "run_name=x"]), load_option)

    with pytest.raises(SystemExit) as stopped:
        guard(main, CONF)
    assert stopped.value.code == 2
    assert "calib.paths: must be set" in capsys.readouterr().err
