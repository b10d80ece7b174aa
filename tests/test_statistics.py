import pytest
import torch

from reprune.errors import NumericalError
from reprune.statistics import BAND, Hessian, InputNorm


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return torch.randn(6, 5, 7)


def hessian_of(matrix):
    """A statistic whose unscaled sum is `matrix`, definite or not."""
    stat = Hessian(len(matrix), "cpu")
    stat.total.copy_(matrix)
    stat.num_sequences, stat.num_tokens = 2, 10
    return stat


def test_norm_is_over_all_tokens(inputs):
    stat = InputNorm(7, "cpu")
    stat.update(inputs)
    torch.testing.assert_close(stat.norm, torch.stack([inputs[:, :, j].flatten().norm() for j in range(7)]))


@pytest.mark.parametrize("columns", [7, 2 * BAND + 5])
def test_hessian_is_the_scaled_sum_of_outer_products(columns):
    torch.manual_seed(0)
    inputs = torch.randn(3, 4, columns)
    stat = Hessian(columns, "cpu")
    stat.update(inputs)
    expected = sum(torch.outer(x, x) for x in inputs.double().flatten(0, 1)) * 2 / 3
    torch.testing.assert_close(stat.matrix.double(), expected, rtol=1e-5, atol=1e-5)
    assert stat.matrix.equal(stat.matrix.T)
    assert (stat.num_sequences, stat.num_tokens) == (3, 12)


@pytest.mark.parametrize("kind", [InputNorm, Hessian])
def test_several_batches_equal_one(kind, inputs):
    whole, parts = kind(7, "cpu"), kind(7, "cpu")
    whole.update(inputs)
    for batch in inputs.split([1, 3, 2]):
        parts.update(batch)
    read = "norm" if kind is InputNorm else "matrix"
    torch.testing.assert_close(getattr(parts, read), getattr(whole, read))


@pytest.mark.parametrize("kind", [InputNorm, Hessian])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_summed_in_float32(kind, dtype):
    inputs = torch.full((1, 3, 2), 300.0, dtype=dtype)  # 300^2 is beyond float16
    stat = kind(2, "cpu")
    stat.update(inputs)
    assert stat.total.dtype == torch.float32
    assert stat.total.flatten()[0] == 3 * inputs[0, 0, 0].float() ** 2


def test_factor_is_the_cholesky_factor_of_the_damped_inverse(inputs):
    stat = Hessian(7, "cpu")
    stat.update(inputs)
    factor = stat.factor(0.01, 1.0)
    damped = stat.matrix.double()
    damped += 0.01 * damped.diagonal().mean() * torch.eye(7)
    expected = torch.linalg.cholesky(damped.inverse(), upper=True)
    torch.testing.assert_close(factor.upper.double(), expected, rtol=1e-4, atol=1e-5)
    assert factor.upper.equal(factor.upper.triu())
    assert factor.damping == 0.01
    assert not factor.dead.any()


def test_factor_is_computed_once_and_again_after_an_update(inputs):
    stat = Hessian(7, "cpu")
    stat.update(inputs)
    first = stat.factor(0.01, 1.0)
    assert stat.factor(0.01, 1.0) is first
    assert stat.factor(0.1, 1.0) is not first
    stat.update(inputs)
    assert stat.factor(0.01, 1.0) is not first


def test_factor_leaves_the_sum_as_it_is(inputs):
    stat = Hessian(7, "cpu")
    stat.update(inputs)
    before = stat.total.clone()
    stat.factor(0.01, 1.0)
    assert stat.total.equal(before)


def test_dead_features_are_named_and_touch_nothing_else(inputs):
    inputs[:, :, [2, 5]] = 0
    stat, live = Hessian(7, "cpu"), Hessian(5, "cpu")
    stat.update(inputs)
    rest = [0, 1, 3, 4, 6]
    live.update(inputs[:, :, rest])
    factor = stat.factor(0.01, 1.0)
    assert factor.dead.nonzero().flatten().tolist() == [2, 5]
    torch.testing.assert_close(factor.upper[rest][:, rest], live.factor(0.01, 1.0).upper)
    assert not factor.upper[2, 3:].any()
    assert not factor.upper[:5, 5].any()


def test_inputs_that_are_all_zero_leave_the_identity():
    stat = Hessian(3, "cpu")
    stat.update(torch.zeros(1, 4, 3))
    factor = stat.factor(0.25, 1.0)
    assert factor.dead.all()
    torch.testing.assert_close(factor.upper, torch.eye(3) / 1.25**0.5)


def test_damping_rises_tenfold_until_the_matrix_is_positive_definite():
    # eigenvalues of the matrix are 1 +- 1.05: it takes damping above 0.05
    stat = hessian_of(torch.tensor([[1.0, 1.05], [1.05, 1.0]]))
    factor = stat.factor(0.001, 1.0)
    assert factor.damping == pytest.approx(0.1)
    damped = stat.matrix + 0.1 * torch.eye(2)
    torch.testing.assert_close(factor.upper.T @ factor.upper, damped.inverse())


def test_the_last_damping_tried_is_max_damping():
    assert hessian_of(torch.tensor([[1.0, 1.05], [1.05, 1.0]])).factor(0.01, 0.07).damping == 0.07


def test_rank_deficient_hessian_needs_some_damping():
    torch.manual_seed(0)
    stat = Hessian(64, "cpu")
    stat.update(torch.randn(1, 2, 64))
    assert 1e-12 < stat.factor(1e-12, 1.0).damping < 1e-2


def test_an_indefinite_hessian_is_an_error_with_the_numbers():
    stat = hessian_of(torch.tensor([[1.0, 5.0], [5.0, 1.0]]))
    with pytest.raises(NumericalError) as caught:
        stat.factor(0.01, 1.0)
    text = str(caught.value)
    assert "10 tokens, 2 columns, tried damping=0.01 to 1" in text
    assert "calib.count" in text
    assert "pruner.max_damping" in text


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_inputs_that_are_not_finite_are_an_error(value):
    stat = Hessian(4, "cpu")
    inputs = torch.ones(1, 3, 4)
    inputs[0, 1, 2] = value
    stat.update(inputs)
    with pytest.raises(NumericalError, match="Hessian not finite"):
        stat.factor(0.01, 1.0)


def test_a_hessian_without_tokens_is_an_error():
    with pytest.raises(NumericalError, match="no calibration token"):
        Hessian(4, "cpu").factor(0.01, 1.0)
