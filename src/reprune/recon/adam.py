"""Gradient steps on the surviving weights of a unit, towards its target, keeping the best iterate.

Source: Shin et al., EMNLP 2024, arXiv:2406.15524, section 2 and appendix; batches, learning rate and AdamW as there.
Differences from the authors' code: a warm-up and a best-iterate rule (their training starts by undoing SparseGPT's
solution, and keeps the last iterate even where it ended above its start); gradients are clipped unscaled; float32
throughout; masks act on gradients, so no product of mask and weight is formed in the forward pass.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from reprune.errors import NumericalError
from reprune.recon.reconstruction import KeepBest, Loss, Reconstruction, Schedule, Trainable

CURVE_POINTS = 20  # how many means of the training loss a curve keeps; enough to draw it


@dataclass
class Fit:
    """What happened to one unit.

    Attributes:
        steps: optimiser steps taken.
        start, best, last: the criterion before, at the iterate that was kept, and at the end; None if it is not
            evaluated (keep_best=none).
        best_step: the step of the kept iterate; 0 is the pruner's own solution.
        evaluations: (step, criterion) pairs.
        curve: (step, mean training loss since the point before) pairs.
    """

    steps: int
    start: float | None = None
    best: float | None = None
    last: float | None = None
    best_step: int | None = None
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)


def fit(
    recon: Reconstruction,
    blocks: list[nn.Module],
    keep: dict[Tensor, Tensor],
    predict: Callable[[Tensor], Tensor],
    inputs: Tensor,
    target: Tensor,
    criterion: Callable[[], float],
    start: float | None,
    generator: torch.Generator,
    forward_size: int,
    where: str,
) -> Fit:
    """Train a unit in place; its pruned weights stay exactly zero.

    Args:
        recon: settings.
        blocks: modules whose parameters are trained, float32, on the computing device.
        keep: for each pruned parameter, where it survives; same shape, bool.
        predict: the unit's forward on a batch (batch, seq_len, hidden).
        inputs: (count, seq_len, hidden) states that enter the unit; not modified.
        target: same shape, what should leave it; not modified.
        criterion: evaluates the error that `keep_best` goes by, under the present weights.
        start: its value before training, if `keep_best` is not none.
        generator: decides the order of the sequences.
        forward_size: sequences that go through at once; a larger batch accumulates its gradient from such parts.
        where: names the unit in errors.

    Raises:
        NumericalError: the training loss is not finite; names unit and step.
    """
    params = trainable_parameters(recon.trainable, blocks, keep)
    masks = [keep.get(param) for param in params]
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
    total = recon.num_steps(len(inputs))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(recon, step, total))
    evaluate_at = {round(total * (i + 1) / recon.evaluations) for i in range(recon.evaluations)}
    record_at = {round(total * (i + 1) / CURVE_POINTS) for i in range(CURVE_POINTS)} | {total}
    tracked = recon.keep_best is not KeepBest.none
    result = Fit(total, start=start, best=start, best_step=0 if tracked else None)
    best = [param.detach().clone() for param in params] if tracked else []
    losses: list[float] = []
    order = _order(len(inputs), recon.batch_size, generator)
    device = params[0].device
    for step in range(1, total + 1):
        rows = next(order)
        value = 0.0
        for part in rows.split(forward_size):
            loss = unit_loss(recon.loss, predict(inputs[part].to(device)), target[part].to(device))
            loss = loss * (len(part) / len(rows))  # losses are means over sequences of one length
            loss.backward()
            value += loss.item()
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
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(value)
        if step in record_at:
            result.curve.append((step, sum(losses) / len(losses)))
            losses.clear()
        if tracked and step in evaluate_at:
            result.last = criterion()
            result.evaluations.append((step, result.last))
            assert result.best is not None  # tracked: start was given
            if result.last < result.best:
                result.best, result.best_step = result.last, step
                for kept, param in zip(best, params, strict=True):
                    kept.copy_(param.detach())
    for param in params:
        param.requires_grad_(False)
    if tracked and result.best_step != total:
        for kept, param in zip(best, params, strict=True):
            param.data.copy_(kept)
    return result


def unit_loss(kind: Loss, predicted: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a unit's output, (batch, seq_len, hidden), against its target, as a scalar.

    `mse` is the paper's. Where a few tokens carry nearly all of the norm (massive activations), it is a loss of those
    few; `tokenwise` counts every token alike: ||difference||^2 / ||target||^2, averaged over tokens.
    """
    squared = (predicted - target).square()
    if kind is Loss.mse:
        return squared.mean()
    return (squared.sum(-1) / target.square().sum(-1).clamp_min(torch.finfo(target.dtype).tiny)).mean()


def trainable_parameters(
    trainable: Trainable, blocks: list[nn.Module], keep: dict[Tensor, Tensor]
) -> list[nn.Parameter]:
    """List the parameters that may move: pruned weights; with norms, every other vector that is no bias; or all."""
    named = [pair for block in blocks for pair in block.named_parameters()]
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
