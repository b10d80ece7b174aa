import os
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from reprune.cli import load_option
from reprune.config import build_plan
from reprune.model.pretrained import Bos, Dtype
from reprune.model.tiny import Tiny
from reprune.walk import CALIB, Walk

CONF = Path(__file__).resolve().parents[1] / "conf"
COMMON = (
    "the of and to in a is that it was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she many "
    "some so these would other into has more her two like him see time could no make than first been its who now "
    "people my made over did down only way find use may water long little very after words called just where most "
    "know river winter stone "
)
WORDS = COMMON.split()

# One thread: on matrices this small more only wait for each other, for minutes if the machine is busy.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # and in the processes that tests start


@pytest.fixture
def tiny_model():
    """(num_blocks, dtype, seed) -> a random Llama of width 32."""

    def make(num_blocks=2, dtype="float32", seed=0):
        return Tiny(
            num_blocks=num_blocks, hidden_size=32, seed=seed, dtype=Dtype(dtype), device="cpu", bos=Bos.never
        ).load()[0]

    return make


@pytest.fixture
def tokens():
    """(count, seq_len, seed) -> random tokens that the tiny model knows."""

    def make(count=5, seq_len=16, seed=0):
        return torch.randint(0, 256, (count, seq_len), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Text of words and paragraphs, about 200 kB, no two paragraphs alike."""
    generator = torch.Generator().manual_seed(0)
    paragraphs = []
    for _ in range(400):
        picks = torch.randint(0, len(WORDS), (100,), generator=generator).tolist()
        sentences = [" ".join(WORDS[i] for i in picks[start : start + 10]).capitalize() for start in range(0, 100, 10)]
        paragraphs.append(". ".join(sentences) + ".")
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return path


@pytest.fixture
def local(text_file):
    """The overrides that turn the default run into one on the tiny model and a local file, without any asset."""
    return ["model=tiny", "calib=local", f"calib.paths={text_file}", "heldout=[local]", "run_name=test"]


@pytest.fixture
def plan_of(local):
    """(overrides) -> the built plan of the repository's config, on the tiny model and a local file unless told."""

    def make(overrides=()):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return build_plan(compose("config", overrides=[*local, *overrides]), load_option)

    return make


@pytest.fixture
def walked(plan_of, tokens):
    """(model, overrides, corpora, seed, rows) -> the finished walk and its records; the model is changed in place."""

    def make(model, overrides=(), corpora=None, seed=0, **rows):
        plan = plan_of(overrides)
        walk = Walk(
            model,
            pruner=plan.pruner,
            recon=plan.recon,
            allocation=plan.allocation,
            corpora=corpora or {CALIB: tokens(6), "other": tokens(4, seed=1)},
            batch_size=4,
            device=torch.device("cpu"),
            stream_device=torch.device("cpu"),
            seed=seed,
            **rows,
        )
        return walk, list(walk)

    return make
