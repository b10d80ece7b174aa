import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from reprune.errors import ConfigError
from reprune.sparsity.pattern import Pattern
from reprune.sparsity.uniform import Uniform

YAML = Path(__file__).parents[2] / "conf/sparsity/uniform.yaml"


def test_allocates_the_ratio_to_every_block():
    uniform = Uniform(ratio=0.3, pattern="unstructured")
    assert uniform.allocate(3) == [0.3, 0.3, 0.3]
    assert uniform.resolved_pattern() == Pattern()


@pytest.mark.parametrize(("ratio", "pattern"), [(None, "1:3"), (0.667, "1:3"), (0.6667, "1:3")])
def test_takes_the_exact_fraction_from_the_pattern(ratio, pattern):
    assert Uniform(ratio=ratio, pattern=pattern).allocate(1) == [1 - 1 / 3]


@pytest.mark.parametrize(
    ("ratio", "pattern", "says"),
    [
        (1.0, "unstructured", "sparsity.ratio=1: removes everything"),
        (-0.1, "unstructured", "sparsity.ratio=-0.1: is negative"),
        (50, "unstructured", "ratio=50: must lie in [0, 1): it is a fraction, not percent. Set sparsity.ratio=0.5."),
        (1e9, "unstructured", "not percent."),
        (math.nan, "unstructured", "sparsity.ratio=nan: not a finite number"),
        (math.inf, "2:4", "sparsity.ratio=inf: not a finite number"),
        (
            0.7,
            "2:4",
            "sparsity.ratio=0.7 with sparsity.pattern=2:4: 2:4 removes 0.5 of the weights. Set sparsity.ratio=0.5 (or "
            "null to take it from the pattern), or sparsity.pattern=unstructured.",
        ),
        (None, "unstructured", "sparsity.ratio=null with sparsity.pattern=unstructured"),
        (0.5, "4:2", "sparsity.pattern=4:2"),
        (0.5, "2-4", "sparsity.pattern=2-4"),
    ],
)  # fmt: skip
def test_errors(ratio, pattern, says):
    with pytest.raises(ConfigError) as caught:
        Uniform(ratio=ratio, pattern=pattern)
    assert says in str(caught.value)


def settings(**changes):
    given = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(YAML), changes))
    del given["_target_"]
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Uniform), given))


def test_the_yaml_fits_the_class():
    assert settings() == Uniform(ratio=0.5, pattern="unstructured")
    assert settings(ratio=None, pattern="2:4").allocate(1) == [0.5]


def test_a_pattern_that_yaml_read_to_base_60_is_explained():
    unquoted = OmegaConf.create("pattern: 2:4")  # the pitfall itself: this is the number 124
    with pytest.raises(ConfigError, match='Quote it, as in pattern: "2:4"'):
        settings(**unquoted)
