import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from reprune.cli import load_option
from reprune.config import build_plan
from reprune.errors import ConfigError
from reprune.pipeline import run

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture
def mixed():
    """(sources, overrides) -> the plan of a mix; corpora are built, and none is read."""

    def make(sources, overrides=()):
        given = ["model=tiny", "calib=mixed", f"calib.sources={sources}", "heldout=[]", "eval=[]", "run_name=test"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return build_plan(compose("config", overrides=[*given, *overrides]), load_option)

    return make


def parts(plan):
    return [(part.corpus, part.count, sorted(use.value for use in part.use)) for part in plan.parts]


def test_counts_follow_weights(mixed):
    plan = mixed("[sotu,{corpus:wiki,weight:3}]", ["calib.count=10"])
    assert parts(plan) == [("sotu", 3, ["mask", "recon"]), ("wiki", 7, ["mask", "recon"])]
    assert plan.mask_rows == plan.recon_rows == slice(0, 10)


def test_each_source_has_its_use(mixed):
    sources = "[{corpus:wiki,use:[recon]},{corpus:sotu,use:[mask]}]"
    plan = mixed(sources, ["calib.count=8"])
    assert parts(plan) == [("sotu", 4, ["mask"]), ("wiki", 4, ["recon"])]
    assert (plan.mask_rows, plan.recon_rows) == (slice(0, 4), slice(4, 8))


def test_a_corpus_may_come_twice_with_other_uses(mixed):
    plan = mixed("[{corpus:sotu,use:[mask]},{corpus:sotu,use:[recon],weight:2}]", ["calib.count=6"])
    assert parts(plan) == [("sotu", 2, ["mask"]), ("sotu", 4, ["recon"])]


def test_sources_keep_their_own_settings(mixed):
    plan = mixed("[{sotu:{pack:true}},{corpus:{selfgen:{temperature:0.5}},use:[recon]}]")
    assert plan.corpora["sotu"].pack is True
    assert plan.corpora["selfgen"].temperature == 0.5
    assert parts(plan)[1] == ("selfgen", 12, ["recon"])


def test_the_resolved_config_builds_the_same_plan(mixed):
    plan = mixed("[{corpus:sotu,weight:2},{corpus:{selfgen:{base:wiki}}}]")
    again = build_plan(OmegaConf.create(plan.resolved), lambda *_: pytest.fail("an option was looked up"))
    assert again == plan


MISTAKES = {
    "[]": r"calib\.sources=\[\]: a mix needs a corpus",
    "[nosuch]": "nosuch: not a corpus",
    "[sotu,{corpus:wiki,weight:0}]": "wiki has weight 0; must be a number above 0",
    "[sotu,{corpus:wiki,weight:a}]": "wiki has weight a; must be a number above 0",
    "[sotu,{corpus:wiki,weight:0.01}]": "wiki with weight 0.01 gets none of them",
    "[sotu,{corpus:wiki,use:[both]}]": r"use of wiki is \['both'\]; must be a list of mask and recon",
    "[sotu,{corpus:wiki,use:[]}]": r"use of wiki=\[\]: must name mask, recon or both",
    "[sotu,mixed]": "mixed: is a mix and no corpus",
    "[{corpus:sotu,use:[recon]}]": "has no sequence to choose masks by",
    "[{corpus:sotu,use:[mask]}]": "no sequence is for reconstruction",
    "[sotu,{corpus:wiki,wieght:2}]": "wieght: no such setting",
    "[{selfgen:{base:selfgen}}]": r"selfgen\.base=selfgen: must be another corpus",
    "[sotu,{sotu:{pack:true}}]": "corpus sotu is set in two ways",
    "[sotu,{selfgen:{generated_count:3}}]": "generated_count has no meaning in a mix",
    "[{corpus:selfgen,use:[mask]},{corpus:selfgen,use:[recon]}]": "selfgen is named twice",
}


@pytest.mark.parametrize("sources", MISTAKES)
def test_mistakes(mixed, sources):
    with pytest.raises(ConfigError, match=MISTAKES[sources]):
        mixed(sources)


def test_text_that_nothing_would_see(mixed):
    with pytest.raises(ConfigError, match="nothing would see the text of wiki"):
        mixed("[sotu,{corpus:wiki,use:[recon]}]", ["recon=none"])


def test_a_mix_is_no_corpus_to_hold_out(plan_of):
    with pytest.raises(ConfigError, match="mixed: is a mix and no corpus"):
        plan_of(["heldout=[mixed]"])


def test_a_run_on_one_corpus_for_masks_and_another_part_of_it_for_reconstruction(mixed, text_file, tmp_path):
    corpus = f"{{local:{{paths:{text_file}}}}}"
    sources = f"[{{corpus:{corpus},use:[mask]}},{{corpus:{corpus},use:[recon],weight:2}}]"
    plan = mixed(sources, ["calib.count=6", "calib.seq_len=32"])
    run(plan, tmp_path / "out")
    drawn = json.loads((tmp_path / "out" / "calib.json").read_text())["calib"]
    assert [(part["use"], part["count"]) for part in drawn] == [(["mask"], 2), (["recon"], 4)]
    used = [{piece["document"] for row in part["sequences"] for piece in row} for part in drawn]
    assert not used[0] & used[1]
