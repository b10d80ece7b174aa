import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import nn

from reprune.errors import NumericalError
from reprune.recon.adam import _order, fit, rate, trainable_parameters, unit_loss
from reprune.recon.reconstruction import KeepBest, Loss, Schedule, Trainable


@pytest.fixture
def recon(plan_of):
    """(overrides) -> built settings of recon=gp."""

    def make(**changes):
        return dataclasses.replace(plan_of(["recon=gp"]).recon, **changes)

    return make


def rates(recon, total):
    return [rate(recon, step, total) for step in range(total)]


def test_the_rate_rises_to_its_peak_in_equal_parts(recon):
    found = rates(recon(warmup=0.3, schedule=Schedule.constant), 10)
    assert found == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 7])


def test_the_rate_falls_in_a_line(recon):
    found = rates(recon(warmup=0.2, schedule=Schedule.linear), 10)
    assert found[:2] == pytest.approx([1 / 3, 2 / 3])
    assert found[2:] == pytest.approx([1 - k / 8 for k in range(8)])


def test_the_rate_falls_as_half_a_cosine(recon):
    found = rates(recon(warmup=0, schedule=Schedule.cosine), 8)
    assert found[0] == 1
    assert found[4] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert [a + b for a, b in zip(found[1:], found[:0:-1], strict=True)] == pytest.approx([1.0] * 7)  # odd about a half


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("warmup", [0, 0.1, 0.5, 0.99])
def test_every_step_moves(recon, schedule, warmup):
    for total in (1, 2, 7, 50):
        assert all(0 < value <= 1 for value in rates(recon(warmup=warmup, schedule=schedule), total))


@pytest.mark.parametrize(("count", "batch"), [(6, 2), (5, 2), (7, 3), (3, 3), (4, 1)])
def test_each_sequence_comes_once_an_epoch(count, batch):
    order = _order(count, batch, torch.Generator().manual_seed(0))
    batches = [next(order) for _ in range(4 * count)]
    assert {len(rows) for rows in batches} == {batch}
    rows = torch.cat(batches)
    epochs = rows[: len(rows) // count * count].view(-1, count)
    assert all(epoch.sort().values.tolist() == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1 or count == 1  # and not always in the same order


def test_losses():
    target = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])
    predicted = torch.tensor([[[3.0, 9.0], [1.0, 1.0]]])
    assert unit_loss(Loss.mse, 2.0, predicted, target).item() == pytest.approx((25 + 1) / 4)
    assert unit_loss(Loss.relative, 6.5, predicted, target).item() == pytest.approx((25 + 1) / 4 / 6.5)
    assert unit_loss(Loss.tokenwise, 2.0, predicted, target).item() == pytest.approx((25 / 25 + 1 / 1) / 2)


def unit(seed=0):
    """A linear that misses half of its weights, its inputs, and what it should give."""
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(6, 6).requires_grad_(False)
    linear.weight.data.normal_(generator=generator)
    linear.bias.data.zero_()
    inputs = torch.randn(8, 5, 6, generator=generator)
    target = inputs @ linear.weight.T
    keep = torch.rand(6, 6, generator=generator) < 0.5
    linear.weight.data.mul_(keep)
    return linear, {linear.weight: keep}, inputs, target


def run(recon, linear, keep, inputs, target, predict=None, forward_size=8):
    def error():
        with torch.no_grad():
            return (linear(inputs) - target).square().mean().item()

    def evaluate(criterion, heldout):
        return error() if criterion else None, {"text": error()} if heldout else {}

    loss = partial(unit_loss, recon.loss, target.square().mean().item())
    generator = torch.Generator().manual_seed(0)
    args = (predict or linear, inputs, target, loss, evaluate, generator, forward_size, "unit", "block 3")
    return fit(recon, [linear], keep, *args), error


@pytest.mark.parametrize("forward_size", [1, 3, 4])
def test_a_batch_in_parts_is_the_same_step(recon, forward_size):
    settings = recon(batch_size=4, epochs=None, steps=6)
    whole, parts = unit(), unit()
    reference, _ = run(settings, *whole)
    accumulated, _ = run(settings, *parts, forward_size=forward_size)
    torch.testing.assert_close(parts[0].weight, whole[0].weight, rtol=1e-5, atol=1e-6)
    assert accumulated.curve == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in reference.curve]


def test_training_lowers_the_error_and_keeps_zeros(recon):
    linear, keep, inputs, target = unit()
    settings = recon(epochs=20, learning_rate=1e-2, loss=Loss.mse, weight_decay=0.1, evaluations=4)
    result, error = run(settings, linear, keep, inputs, target)
    assert result.best == error() < result.start
    assert not linear.weight[~keep[linear.weight]].any()
    assert linear.weight[keep[linear.weight]].all()
    assert not linear.bias.any()  # trainable=weights
    assert result.steps == 80  # 20 epochs of 8 sequences, 2 a step
    assert [step for step, _ in result.evaluations] == [20, 40, 60, 80]
    assert [step for step, _ in result.curve] == list(range(4, 81, 4))
    assert not linear.weight.requires_grad


def test_the_best_iterate_comes_back(recon):
    linear, keep, inputs, target = unit()
    before = linear.weight.clone()
    settings = recon(epochs=5, learning_rate=10.0, warmup=0, schedule=Schedule.constant, loss=Loss.mse)
    result, error = run(settings, linear, keep, inputs, target)
    assert result.best_step == 0
    assert result.last > result.start == result.best == error()
    assert torch.equal(linear.weight, before)


def test_keep_best_none_keeps_the_last(recon):
    linear, keep, inputs, target = unit()
    before = linear.weight.clone()
    settings = recon(epochs=5, learning_rate=10.0, loss=Loss.mse, keep_best=KeepBest.none)
    result, _ = run(settings, linear, keep, inputs, target)
    assert (result.start, result.best, result.last, result.best_step, result.evaluations) == (
        None,
        None,
        None,
        None,
        [],
    )
    assert not torch.equal(linear.weight, before)


def test_a_loss_that_is_not_finite_names_unit_and_step(recon):
    linear, keep, inputs, target = unit()
    calls = []

    def predict(batch):
        calls.append(1)
        return linear(batch) * (math.nan if len(calls) == 3 else 1)

    with pytest.raises(
        NumericalError, match=r"block 3, step 3 of 4: training loss is nan\. Lower recon\.learning_rate="
    ):
        run(recon(epochs=1), linear, keep, inputs, target, predict)


def test_what_may_be_trained():
    block = nn.ModuleDict({"norm": nn.LayerNorm(4), "linear": nn.Linear(4, 4)})
    keep = {block["linear"].weight: torch.ones(4, 4, dtype=torch.bool)}

    def names(trainable):
        chosen = {id(param) for param in trainable_parameters(trainable, [block], keep)}
        return {name for name, param in block.named_parameters() if id(param) in chosen}

    assert names(Trainable.weights) == {"linear.weight"}
    assert names(Trainable.weights_and_norms) == {"linear.weight", "norm.weight"}
    assert names(Trainable.all) == {"linear.weight", "linear.bias", "norm.weight", "norm.bias"}
