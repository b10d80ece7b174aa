import pytest
import torch

from reprune.errors import ConfigError, NumericalError
from reprune.pruner.sparsegpt import STRIP, SparseGPT
from reprune.sparsity.pattern import Pattern, removed_count
from reprune.statistics import Hessian


def pruner(column_block=8, damping=0.01, max_damping=1.0):
    return SparseGPT(damping=damping, max_damping=max_damping, column_block=column_block)


def problem(rows, columns, tokens=200, dead=(), seed=0):
    """Weights, and the statistic of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.5 * torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(2, tokens, columns, generator=generator) @ mix
    inputs[:, :, list(dead)] = 0
    stat = Hessian(columns, "cpu")
    stat.update(inputs)
    return torch.randn(rows, columns, generator=generator), stat


def slow(weight, hessian, sparsity, pattern, column_block, damping):
    """SparseGPT as its derivation says: float64, and the remaining Hessian inverted afresh for every column."""
    weight, hessian = weight.double().clone(), hessian.double().clone()
    dead = hessian.diagonal() == 0
    mean = hessian.diagonal()[~dead].mean()
    hessian.diagonal()[dead] = mean
    hessian.diagonal().add_(damping * mean)
    rows, columns = weight.shape
    keep = torch.ones(rows, columns, dtype=torch.bool)
    inverse = [hessian[i:, i:].inverse() for i in range(columns)]

    def score(column):
        return torch.zeros(rows).double() if dead[column] else weight[:, column] ** 2 / inverse[column][0, 0]

    for column in range(columns):
        if pattern.group is None and column % column_block == 0:
            stop = min(column + column_block, columns)
            scores = torch.cat([score(i) for i in range(column, stop)])
            gone = scores.argsort(stable=True)[: removed_count(len(scores), sparsity)]
            for position in gone.tolist():
                keep[position % rows, column + position // rows] = False
        elif pattern.group is not None and column % pattern.group == 0:
            stop = min(column + pattern.group, columns)
            scores = torch.stack([score(i) for i in range(column, stop)], dim=1)
            gone = scores.argsort(dim=1, stable=True)[:, : max(0, stop - column - pattern.kept)]
            keep[:, column:stop] = torch.ones(rows, stop - column, dtype=torch.bool).scatter(1, gone, False)
        error = weight[:, column].masked_fill(keep[:, column], 0) / inverse[column][0, 0]
        weight[:, column:] -= torch.outer(error, inverse[column][0])
    return weight.masked_fill(~keep, 0), keep


def loss(weight, pruned, hessian):
    change = (weight - pruned).double()
    return (change @ hessian.double() * change).sum().item()


@pytest.mark.parametrize(
    ("rows", "columns", "column_block"),
    [(12, 24, 8), (7, 19, 8), (9, 2 * STRIP + 5, 2 * STRIP), (5, 20, 128), (1, 9, 4)],
)
@pytest.mark.parametrize("pattern", [Pattern(), Pattern(2, 4), Pattern(1, 4), Pattern(3, 4)], ids=str)
@pytest.mark.parametrize("sparsity", [0.3, 0.8])
def test_equals_the_slow_version(rows, columns, column_block, pattern, sparsity):
    weight, stat = problem(rows, columns)
    result = pruner(column_block).prune(weight, stat, sparsity, pattern)
    expected, keep = slow(weight, stat.matrix, sparsity, pattern, column_block, 0.01)
    assert result.keep.equal(keep)
    torch.testing.assert_close(result.weight.double(), expected, rtol=1e-4, atol=1e-4)
    assert result.damping == 0.01


@pytest.mark.parametrize("pattern", [Pattern(), Pattern(2, 4)], ids=str)
def test_equals_the_slow_version_with_dead_features(pattern):
    weight, stat = problem(6, 20, dead=[2, 3, 4, 11, 19])
    result = pruner().prune(weight, stat, 0.5, pattern)
    expected, keep = slow(weight, stat.matrix, 0.5, pattern, 8, 0.01)
    assert result.keep.equal(keep)
    torch.testing.assert_close(result.weight.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pattern", [Pattern(), Pattern(2, 4)], ids=str)
def test_the_update_beats_the_mask_alone(pattern):
    weight, stat = problem(16, 32)
    result = pruner().prune(weight, stat, 0.5, pattern)
    hessian = stat.matrix
    assert loss(weight, result.weight, hessian) < 0.9 * loss(weight, weight * result.keep, hessian)


def test_one_column_block_without_later_columns_moves_nothing():
    weight, stat = problem(6, 1)
    result = pruner().prune(weight, stat, 0.5, Pattern())
    assert result.weight.equal(weight * result.keep)


def test_dead_weights_go_first_and_those_kept_stay_as_they_are():
    weight, stat = problem(6, 16, dead=[1, 12])
    result = pruner().prune(weight, stat, 0.0625, Pattern())  # 3 of the 48 weights of each column block
    assert not result.keep[:3, 1].any()
    assert not result.keep[:3, 12].any()
    assert result.keep.sum() == 90
    assert result.weight[3:, [1, 12]].equal(weight[3:, [1, 12]])


def test_linears_that_share_a_statistic_get_what_their_own_would_give():
    weight, stat = problem(6, 16)
    other = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    pruner().prune(other, stat, 0.5, Pattern())
    factor = stat.factor(0.01, 1.0)
    shared = pruner().prune(weight, stat, 0.5, Pattern())
    assert stat.factor(0.01, 1.0) is factor
    fresh = pruner().prune(weight, problem(6, 16)[1], 0.5, Pattern())
    assert shared.weight.equal(fresh.weight)


def test_the_damping_that_was_needed_is_reported():
    weight, stat = problem(6, 64, tokens=2)  # 4 tokens for 64 columns
    result = pruner(damping=1e-12).prune(weight, stat, 0.5, Pattern())
    assert result.damping > 1e-12
    assert result.weight.isfinite().all()


def test_a_hessian_beyond_max_damping_is_an_error():
    weight, stat = problem(6, 8)
    stat.total[3, 2] = 1e9
    with pytest.raises(NumericalError, match="not positive definite"):
        pruner().prune(weight, stat, 0.5, Pattern())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"damping": 0.0}, "pruner.damping=0:"),
        ({"damping": -1.0}, "pruner.damping=-1:"),
        ({"damping": float("nan")}, "pruner.damping=nan:"),
        ({"max_damping": 0.001}, "pruner.max_damping=0.001 with pruner.damping=0.01"),
        ({"column_block": 0}, "pruner.column_block=0"),
    ],
)
def test_settings_out_of_range(settings, says):
    with pytest.raises(ConfigError) as caught:
        pruner(**settings)
    assert says in str(caught.value)


def test_a_column_block_that_cuts_groups_is_a_problem():
    text = pruner(column_block=100).problem(Pattern(4, 8))
    assert text.startswith("pruner.column_block=100 with sparsity.pattern=4:8")
    assert "multiple of 8, such as 104" in text
    assert pruner(column_block=104).problem(Pattern(4, 8)) is None
    assert pruner(column_block=100).problem(Pattern()) is None
    with pytest.raises(ConfigError, match="column_block=100"):
        pruner(column_block=100).prune(*problem(4, 16), 0.5, Pattern(4, 8))
