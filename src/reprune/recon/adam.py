"""Gradient steps on the surviving weights of a unit, towards its target, keeping the best iterate.

Source: Shin et al., EMNLP 2024, arXiv:2406.15524, section 2 and appendix; batches, learning rate and AdamW as there.
Differences from the authors' code: a warm-up and a best-iterate rule (their training starts by undoing SparseGPT's
solution, and keeps the last iterate even where it ended above its start); gradients are clipped unscaled; float32
throughout; masks act on gradients, so no product of mask and weight is formed in the forward pass.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from reprune.errors import NumericalError
from reprune.recon.reconstruction import KeepBest, Loss, Reconstruction, Schedule, Trainable

CURVE_POINTS = 20  # how many means of the training loss a curve keeps; enough to draw it


@dataclass
class Fit:
    """What happened to one unit.

    Attributes:
        unit: what was trained: `blocks`, or the piece of a block.
        steps: optimiser steps taken.
        start, best, last: the criterion before, at the iterate that was kept, and at the end; None if it is not
            evaluated (keep_best=none).
        best_step: the step of the kept iterate; 0 is what training started from.
        diverged: whether training ended above its start, so that the weights it ended with were worse than none of it.
        evaluations: (step, criterion) pairs.
        heldout: (step, corpus -> relative error after the unit) pairs, empty unless asked for.
        curve: (step, mean training loss since the point before) pairs.
    """

    unit: str
    steps: int
    start: float | None = None
    best: float | None = None
    last: float | None = None
    best_step: int | None = None
    diverged: bool = False
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    heldout: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)


class Evaluate(Protocol):
    """Evaluates a unit under its present weights."""

    def __call__(self, criterion: bool, heldout: bool) -> tuple[float | None, dict[str, float]]:
        """Return the error that `keep_best` goes by and the held-out errors by corpus, as far as they are asked for."""


def fit(
    recon: Reconstruction,
    modules: list[nn.Module],
    keep: dict[Tensor, Tensor],
    predict: Callable[[Tensor], Tensor],
    inputs: Tensor,
    target: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    evaluate: Evaluate,
    generator: torch.Generator,
    forward_size: int,
    unit: str,
    where: str,
) -> Fit:
    """Train a unit in place; its pruned weights stay exactly zero.

    Args:
        recon: settings.
        modules: whose parameters are trained, float32, on the computing device.
        keep: for each pruned parameter, where it survives; same shape, bool.
        predict: the unit's forward on a batch (batch, seq_len, hidden).
        inputs: (count, seq_len, hidden) states that enter the unit; not modified.
        target: (count, seq_len, features), what should leave it; not modified.
        loss: of a prediction against a target, a mean over sequences.
        evaluate: the errors under the present weights; called before training, and then as often as settings say.
        generator: decides the order of the sequences.
        forward_size: sequences that go through at once; a larger batch accumulates its gradient from such parts.
        unit: names the unit in the record.
        where: names it in errors.

    Raises:
        NumericalError: the training loss is not finite; names unit and step.
    """
    params = trainable_parameters(recon.trainable, modules, keep)
    masks = [keep.get(param) for param in params]
    total = recon.num_steps(len(inputs))
    tracked, watched = recon.keep_best is not KeepBest.none, recon.heldout_evaluations > 0
    start, errors = evaluate(tracked, watched) if tracked or watched else (None, {})
    result = Fit(unit, total, start=start, best=start, best_step=0 if tracked else None)
    if watched:
        result.heldout.append((0, errors))
    origin = [param.detach().clone() for param in params] if tracked or recon.anchor else []
    best = [value.clone() for value in origin] if tracked else []
    for param in params:
        param.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        params,
        lr=recon.learning_rate,
        betas=(recon.beta1, recon.beta2),
        eps=recon.epsilon,
        weight_decay=recon.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(recon, step, total))
    evaluate_at = spread(total, recon.evaluations) if tracked else set()
    watch_at = spread(total, recon.heldout_evaluations)
    record_at = spread(total, CURVE_POINTS) | {total}
    losses: list[float] = []
    order = _order(len(inputs), recon.batch_size, generator)
    device = params[0].device
    worse = 0  # evaluations in a row
    for step in range(1, total + 1):
        rows = next(order)
        value = 0.0
        for part in rows.split(forward_size):
            share = len(part) / len(rows)  # losses are means over sequences of one length
            error = loss(predict(inputs[part].to(device).float()), target[part].to(device).float()) * share
            error.backward()
            value += error.item()
        if not math.isfinite(value):
            raise NumericalError(
                f"{where}, step {step} of {total}: training loss is {value}. Lower recon.learning_rate="
                f"{recon.learning_rate:g} or raise recon.warmup={recon.warmup:g}."
            )
        for param, mask in zip(params, masks, strict=True):
            if mask is not None and param.grad is not None:
                param.grad.mul_(mask)  # a weight that starts at zero and gets no gradient stays exactly zero
        if recon.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(params, recon.max_grad_norm)
        pull = recon.anchor * optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if pull:
            for param, value_then in zip(params, origin, strict=True):
                param.data.lerp_(value_then, min(pull, 1.0))
        losses.append(value)
        if step in record_at:
            result.curve.append((step, sum(losses) / len(losses)))
            losses.clear()
        if step in evaluate_at or step in watch_at:
            criterion, errors = evaluate(step in evaluate_at, step in watch_at)
            if step in watch_at:
                result.heldout.append((step, errors))
            if criterion is not None and result.best is not None:
                result.last = criterion
                result.evaluations.append((step, criterion))
                worse = 0 if criterion < result.best else worse + 1
                if not worse:
                    result.best, result.best_step = criterion, step
                    for kept, param in zip(best, params, strict=True):
                        kept.copy_(param.detach())
                if worse == recon.patience:
                    result.steps = step
                    break
    for param in params:
        param.requires_grad_(False)
    if tracked and result.best_step != result.steps:
        for kept, param in zip(best, params, strict=True):
            param.data.copy_(kept)
    result.diverged = result.last is not None and result.start is not None and result.last > result.start
    return result


def unit_loss(kind: Loss, scale: float, predicted: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a unit's output, (batch, seq_len, features), against its target, as a scalar.

    `mse` is the paper's. Where a few tokens carry nearly all of the norm (massive activations), it is a loss of those
    few; `tokenwise` counts every token alike: ||difference||^2 / ||target||^2, averaged over tokens. `relative` is the
    mean squared error over `scale`, the mean square of all targets: the same minimiser, but one size for all blocks, so
    that epsilon, clipping and anchor mean the same everywhere.
    """
    squared = (predicted - target).square()
    if kind is Loss.tokenwise:
        return (squared.sum(-1) / target.square().sum(-1).clamp_min(torch.finfo(target.dtype).tiny)).mean()
    return squared.mean() / scale if kind is Loss.relative else squared.mean()


def spread(total: int, times: int) -> set[int]:
    """Return the steps of so many evaluations, evenly spread, the last at the end."""
    return {round(total * (i + 1) / times) for i in range(times)}


def trainable_parameters(
    trainable: Trainable, modules: list[nn.Module], keep: dict[Tensor, Tensor]
) -> list[nn.Parameter]:
    """List the parameters that may move: pruned weights; with norms, every other vector that is no bias; or all."""
    named = [pair for module in modules for pair in module.named_parameters()]
    if trainable is Trainable.all:
        return [param for _, param in named]
    norms = trainable is Trainable.weights_and_norms
    return [
        param for name, param in named if param in keep or (norms and param.ndim == 1 and not name.endswith("bias"))
    ]


def rate(recon: Reconstruction, step: int, total: int) -> float:
    """Return the learning rate of a step (0-based) as a fraction of its peak: a linear warm-up, then the schedule."""
    warmup = round(recon.warmup * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total - warmup)
    if recon.schedule is Schedule.linear:
        return 1 - done
    return 0.5 * (1 + math.cos(math.pi * done)) if recon.schedule is Schedule.cosine else 1.0


def _order(count: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of row indices for ever: each sequence once before any comes again, in a new order each time."""
    queue = torch.empty(0, dtype=torch.int64)
    while True:
        if len(queue) < batch_size:
            queue = torch.cat([queue, torch.randperm(count, generator=generator)])
        yield queue[:batch_size]
        queue = queue[batch_size:]
