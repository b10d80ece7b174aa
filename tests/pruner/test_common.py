"""What every pruner promises, whatever its scores."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from reprune.errors import NumericalError
from reprune.pruner.magnitude import Magnitude
from reprune.pruner.sparsegpt import SparseGPT
from reprune.pruner.wanda import Wanda
from reprune.sparsity.pattern import Pattern, removed_count

CONF = Path(__file__).parents[2] / "conf/pruner"
PRUNERS = [Magnitude(), Wanda(), SparseGPT(damping=0.01, max_damping=1.0, column_block=8)]
SHAPES = [(16, 24), (7, 19), (1, 13), (5, 1), (3, 8)]
every_pruner = pytest.mark.parametrize("pruner", PRUNERS, ids=lambda pruner: type(pruner).__name__)


def gather(pruner, columns, dead=(), scale=1.0):
    if pruner.statistic is None:
        return None
    generator = torch.Generator().manual_seed(1)
    inputs = scale * torch.randn(2, 3 * columns, columns, generator=generator)
    inputs[:, :, list(dead)] = 0
    stat = pruner.statistic(columns, "cpu")
    stat.update(inputs)
    return stat


def weights(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def expected_count(pruner, shape, sparsity):
    rows, columns = shape
    if isinstance(pruner, Wanda):
        return rows * removed_count(columns, sparsity)
    if isinstance(pruner, SparseGPT):
        widths = [min(pruner.column_block, columns - start) for start in range(0, columns, pruner.column_block)]
        return sum(removed_count(rows * width, sparsity) for width in widths)
    return removed_count(rows * columns, sparsity)


def check_result(result, weight):
    assert result.weight.dtype == weight.dtype
    assert result.weight.shape == result.keep.shape == weight.shape
    assert result.keep.dtype == torch.bool
    assert result.weight.is_contiguous()
    assert result.keep.is_contiguous()
    assert not result.weight[~result.keep].any()
    assert result.weight.isfinite().all()


@every_pruner
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.77, 0.99])
def test_removes_exactly_the_count(pruner, shape, sparsity):
    weight = weights(shape)
    result = pruner.prune(weight, gather(pruner, shape[1]), sparsity, Pattern())
    check_result(result, weight)
    assert (~result.keep).sum() == expected_count(pruner, shape, sparsity)


@every_pruner
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", [Pattern(2, 4), Pattern(1, 4), Pattern(3, 4), Pattern(4, 8)], ids=str)
def test_every_group_keeps_exactly_its_share(pruner, shape, pattern):
    weight = weights(shape)
    result = pruner.prune(weight, gather(pruner, shape[1]), 0.5, pattern)
    check_result(result, weight)
    for start in range(0, shape[1], pattern.group):
        group = result.keep[:, start : start + pattern.group]
        assert (group.sum(1) == min(pattern.kept, group.shape[1])).all()


@every_pruner
@pytest.mark.parametrize("pattern", [Pattern(), Pattern(2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights(pruner, pattern, dtype):
    weight = weights((12, 19), dtype)
    result = pruner.prune(weight, gather(pruner, 19), 0.5, pattern)
    check_result(result, weight)
    # computed in float32: the same as from the same values in float32, rounded once
    wide = pruner.prune(weight.float(), gather(pruner, 19), 0.5, pattern)
    assert result.keep.equal(wide.keep)
    assert result.weight.equal(wide.weight.to(dtype))


@every_pruner
@pytest.mark.parametrize("pattern", [Pattern(), Pattern(2, 4)], ids=str)
def test_ties_do_not_change_the_count(pruner, pattern):
    weight = torch.full((6, 16), 0.25)
    result = pruner.prune(weight, gather(pruner, 16), 0.5, pattern)
    check_result(result, weight)
    assert (~result.keep).sum() == 48


@every_pruner
@pytest.mark.parametrize("pattern", [Pattern(), Pattern(2, 4), Pattern(3, 4)], ids=str)
@pytest.mark.parametrize("dead", [[3], [0, 1, 2, 9, 10, 11], range(16)], ids=str)
def test_dead_features_do_not_change_the_count(pruner, pattern, dead):
    weight = weights((6, 16))
    result = pruner.prune(weight, gather(pruner, 16, dead), 0.5, pattern)
    check_result(result, weight)
    assert (~result.keep).sum() == round(6 * 16 * (0.5 if pattern.sparsity is None else pattern.sparsity))


@every_pruner
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparsity_zero_changes_nothing(pruner, dtype):
    weight = weights((6, 19), dtype)
    weight[0, 0] = -0.0
    result = pruner.prune(weight, gather(pruner, 19), 0.0, Pattern())
    assert result.keep.all()
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    assert result.weight.view(integer).equal(weight.view(integer))
    assert result.weight.data_ptr() != weight.data_ptr()


@every_pruner
@pytest.mark.parametrize("pattern", [Pattern(), Pattern(2, 4)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_input_is_not_modified_and_the_result_repeats(pruner, pattern, shape):
    weight = weights(shape)
    before = weight.clone()
    first = pruner.prune(weight, gather(pruner, shape[1]), 0.5, pattern)
    assert weight.equal(before)
    second = pruner.prune(weight, gather(pruner, shape[1]), 0.5, pattern)
    assert first.weight.equal(second.weight)
    assert first.keep.equal(second.keep)


@every_pruner
def test_a_view_of_a_larger_weight_gives_the_same(pruner):
    weight = weights((8, 16))
    stat = gather(pruner, 16)
    view = weight.T.contiguous().T  # as a Conv1D hands it over
    assert pruner.prune(view, stat, 0.5, Pattern()).weight.equal(pruner.prune(weight, stat, 0.5, Pattern()).weight)


@every_pruner
def test_a_nan_weight_is_an_error(pruner):
    weight = weights((4, 8))
    weight[1, 1] = torch.nan
    with pytest.raises(NumericalError, match="NaN"):
        pruner.prune(weight, gather(pruner, 8), 0.5, Pattern())


@pytest.mark.parametrize("pruner", PRUNERS[1:], ids=lambda pruner: type(pruner).__name__)
def test_a_statistic_of_another_width_is_an_error(pruner):
    with pytest.raises(ValueError, match="stat has 6 features, weight has 8"):
        pruner.prune(weights((4, 8)), gather(pruner, 6), 0.5, Pattern())


def test_every_yaml_fits_its_class():
    classes = {"magnitude": Magnitude, "wanda": Wanda, "sparsegpt": SparseGPT}
    for name, cls in classes.items():
        given = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
        assert given.pop("_target_") == f"{cls.__module__}.{cls.__name__}"
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), given))
