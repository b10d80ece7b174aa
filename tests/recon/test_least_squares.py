import pytest
import torch

from reprune.recon.least_squares import least_squares
from reprune.sparsity.pattern import Pattern
from reprune.statistics import CrossMoment, Hessian


def problem(rows=6, columns=10, tokens=200, seed=0, rank=None):
    """Weights, a mask, and inputs; with a rank the inputs lie in so few dimensions."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    if rank is not None:
        mix = torch.randn(columns, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
        inputs = inputs @ mix
    weight = torch.randn(rows, columns, generator=generator)
    keep = torch.rand(rows, columns, generator=generator) < 0.5
    return weight, keep, inputs


def loss(weight, inputs, target):
    return (inputs.double() @ weight.double().T - target).square().sum().item()


def by_rows(keep, inputs, target):
    """The slow version: one dense least-squares problem a row."""
    solution = torch.zeros(keep.shape, dtype=torch.float64)
    for row, kept in enumerate(keep):
        if kept.any():
            found = torch.linalg.lstsq(inputs.double()[:, kept], target[:, row : row + 1], driver="gelsd").solution
            solution[row, kept] = found[:, 0]
    return solution


def solve(weight, keep, inputs, dense_inputs=None, start=None, tolerance=1e-9, steps=2000, damping=0.0):
    gram = inputs.double().T @ inputs.double()
    cross = None if dense_inputs is None else dense_inputs.double().T @ inputs.double()
    return least_squares(
        weight, weight * keep if start is None else start, keep, gram, cross, damping, tolerance, steps
    )


@pytest.mark.parametrize("seed", range(3))
def test_equals_a_dense_solve_for_each_row(seed):
    weight, keep, inputs = problem(seed=seed)
    target = inputs.double() @ weight.double().T
    solution = solve(weight, keep, inputs)
    torch.testing.assert_close(solution.weight.double(), by_rows(keep, inputs, target), rtol=1e-4, atol=1e-5)
    scale = target.square().sum().item()
    assert solution.start == pytest.approx(loss(weight * keep, inputs, target) / scale, rel=1e-6)
    assert solution.loss == pytest.approx(loss(solution.weight, inputs, target) / scale, rel=1e-4)
    assert not solution.weight[~keep].any()


@pytest.mark.parametrize("seed", range(3))
def test_a_dense_target_takes_the_cross_moment(seed):
    weight, keep, inputs = problem(seed=seed)
    dense_inputs = inputs + 0.3 * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(9))
    target = dense_inputs.double() @ weight.double().T
    solution = solve(weight, keep, inputs, dense_inputs)
    torch.testing.assert_close(solution.weight.double(), by_rows(keep, inputs, target), rtol=1e-4, atol=1e-5)
    local = solve(weight, keep, inputs)
    assert loss(solution.weight, inputs, target) < loss(local.weight, inputs, target)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_gram_matrix_without_full_rank(rank):
    weight, keep, inputs = problem(rank=rank)
    target = inputs.double() @ weight.double().T
    best = loss(by_rows(keep, inputs, target), inputs, target)
    solution = solve(weight, keep, inputs)
    assert solution.weight.isfinite().all()
    assert loss(solution.weight, inputs, target) <= best + 1e-6 * target.square().sum().item()


def test_inputs_of_very_different_sizes():
    weight, keep, inputs = problem(columns=12)
    inputs = inputs * torch.logspace(-3, 3, 12)  # as massive activations make them
    target = inputs.double() @ weight.double().T
    best = loss(by_rows(keep, inputs, target), inputs, target)
    solution = solve(weight, keep, inputs)
    assert loss(solution.weight, inputs, target) <= best + 1e-9 * target.square().sum().item()


def test_dead_inputs_keep_their_weights():
    weight, keep, inputs = problem()
    inputs[:, [2, 5]] = 0
    start = torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)) * keep
    solution = solve(weight, keep, inputs, start=start)
    assert torch.equal(solution.weight[:, [2, 5]], start[:, [2, 5]])
    assert solution.weight.isfinite().all()


def test_inputs_that_are_all_dead():
    weight, keep, inputs = problem()
    solution = solve(weight, keep, inputs * 0)
    assert torch.equal(solution.weight, weight * keep)
    assert (solution.start, solution.loss, solution.iterations) == (0, 0, 0)


def test_keeping_everything_gives_the_dense_weight():
    weight, keep, inputs = problem()
    solution = solve(weight, torch.ones_like(keep), inputs, start=torch.zeros_like(weight))
    torch.testing.assert_close(solution.weight, weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 5, 50])
def test_more_steps_are_never_worse(steps):
    weight, keep, inputs = problem(columns=40)
    few, more = (solve(weight, keep, inputs, steps=n) for n in (steps, steps + 1))
    assert more.loss <= few.loss <= few.start
    assert few.iterations <= steps


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("damping", [0.0, 1e-3])
@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_sparsegpts_own_update(plan_of, pattern, seed, damping):
    weight, _, inputs = problem(rows=16, columns=32, tokens=300, seed=seed)
    stat = Hessian(32, "cpu")
    stat.update(inputs.unsqueeze(0))
    pruned = plan_of(["pruner=sparsegpt"]).pruner.prune(weight, stat, 0.5, Pattern.parse(pattern))
    solution = least_squares(weight, pruned.weight, pruned.keep, stat.gram, None, damping, 1e-6, 500)
    target = inputs.double() @ weight.double().T
    assert loss(solution.weight, inputs, target) < loss(pruned.weight, inputs, target)
    assert torch.equal(solution.weight != 0, pruned.keep)


def test_damping_minimises_the_loss_and_the_pull():
    weight, keep, inputs = problem()
    start = torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)) * keep
    solution = solve(weight, keep, inputs, start=start, damping=0.1)
    # The same problem with a row for each pull: sqrt(0.1) ||x_j|| (w_j - start_j).
    pull = torch.diag(0.1**0.5 * inputs.double().norm(dim=0))
    for row, kept in enumerate(keep):
        rows = torch.cat([inputs.double(), pull])[:, kept]
        target = torch.cat([inputs.double() @ weight[row].double(), pull @ start[row].double()])
        exact = torch.linalg.lstsq(rows, target[:, None], driver="gelsd").solution[:, 0]
        torch.testing.assert_close(solution.weight[row, kept].double(), exact, rtol=1e-4, atol=1e-5)
    assert solution.loss < solution.start


def test_the_moments_are_sums_over_tokens():
    _, _, inputs = problem()
    dense = inputs.flip(0)
    hessian, cross = Hessian(10, "cpu"), CrossMoment(10, "cpu")
    for part, other in zip(inputs.view(4, 50, 10), dense.view(4, 50, 10), strict=True):
        hessian.update(part.unsqueeze(0))
        cross.update(part.unsqueeze(0), other.unsqueeze(0))
    torch.testing.assert_close(hessian.gram, inputs.T @ inputs, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(cross.total, dense.T @ inputs, rtol=1e-4, atol=1e-3)
