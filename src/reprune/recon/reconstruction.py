"""Reconstruction as settings: which unit learns, from which stream, towards which target, and how it is solved.

The published strategies are presets over this one class (conf/recon/*.yaml).

Source: Shin et al., EMNLP 2024, arXiv:2406.15524, sections 2 and 3 and appendix A. The paper's formula for global
propagation can be read two ways; `inputs` and `target` name both, and recon=gp is what the authors' code does: pruned
inputs, dense target.
"""

import math
from dataclasses import dataclass
from enum import Enum
from itertools import count

from reprune.errors import ConfigError


class Solver(Enum):
    """How a unit is brought closer to its target."""

    none = "none"
    adam = "adam"


class Unit(Enum):
    """What is optimised as one piece."""

    block = "block"


class Inputs(Enum):
    """Which stream feeds the unit while it learns."""

    pruned = "pruned"
    dense = "dense"


class Target(Enum):
    """What the unit regresses to: the dense unit on the unit's own inputs, or the dense stream after the unit."""

    local = "local"
    dense = "dense"


class Schedule(Enum):
    """How the learning rate falls after the warm-up."""

    linear = "linear"
    cosine = "cosine"
    constant = "constant"


class Trainable(Enum):
    """Which parameters of the unit may move; pruned weights never do."""

    weights = "weights"
    weights_and_norms = "weights_and_norms"
    all = "all"


class Loss(Enum):
    """What a step lowers: the mean squared error, or that of each token over the squared norm of its target."""

    mse = "mse"
    tokenwise = "tokenwise"


class KeepBest(Enum):
    """By which error the best iterate is chosen; none keeps the last."""

    none = "none"
    calib = "calib"
    heldout = "heldout"


@dataclass(frozen=True)
class Window:
    """Consecutive blocks that learn together.

    Attributes:
        blocks: indices of all blocks of the window.
        entering: those that no earlier window held; they are pruned now.
        leaving: those that no later window holds; they are measured and passed now.
    """

    blocks: range
    entering: range
    leaving: range


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Settings of a reconstruction; each is explained in conf/recon/br.yaml."""

    solver: Solver
    unit: Unit
    window: int
    stride: int
    inputs: Inputs
    target: Target
    epochs: float | None
    steps: int | None
    batch_size: int
    learning_rate: float
    warmup: float
    schedule: Schedule
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float | None
    loss: Loss
    trainable: Trainable
    keep_best: KeepBest
    evaluations: int

    def __post_init__(self) -> None:
        def require(holds: bool, key: str, rule: str) -> None:
            if not holds:
                raise ConfigError(f"recon.{key}={getattr(self, key)}: {rule}")

        require(self.window >= 1, "window", "must be at least 1 block.")
        require(
            1 <= self.stride <= self.window,
            "stride",
            f"must be between 1 and recon.window={self.window}, or blocks would be left out.",
        )
        if self.inputs is Inputs.dense and self.target is Target.local:
            raise ConfigError(
                "recon.inputs=dense with recon.target=local: on dense inputs the dense unit's output is the dense "
                "stream, which is what recon.target=dense says. Use recon.target=dense."
            )
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"recon.epochs={self.epochs} and recon.steps={self.steps}: exactly one of them sets the length of "
                f"training. Set the other to null."
            )
        require(self.epochs is None or 0 < self.epochs < math.inf, "epochs", "must be a positive number of passes.")
        require(self.steps is None or self.steps >= 1, "steps", "must be at least 1.")
        require(self.batch_size >= 1, "batch_size", "must be at least 1 sequence.")
        require(0 < self.learning_rate < math.inf, "learning_rate", "must be a positive number.")
        require(0 <= self.warmup < 1, "warmup", "is a fraction of the steps, in [0, 1).")
        require(0 <= self.beta1 < 1, "beta1", "must lie in [0, 1).")
        require(0 <= self.beta2 < 1, "beta2", "must lie in [0, 1).")
        require(self.epsilon > 0, "epsilon", "must be positive.")
        require(self.weight_decay >= 0, "weight_decay", "must not be negative.")
        require(self.max_grad_norm is None or self.max_grad_norm > 0, "max_grad_norm", "must be positive, or null.")
        require(self.evaluations >= 1, "evaluations", "must be at least 1 (the end of training).")

    @property
    def trains(self) -> bool:
        """Whether any weight changes after pruning."""
        return self.solver is not Solver.none

    def num_steps(self, count: int) -> int:
        """Return the optimiser steps per window for `count` calibration sequences."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None  # __post_init__ saw to it
        return max(1, round(self.epochs * count / self.batch_size))

    def windows(self, num_blocks: int) -> list[Window]:
        """List the windows over a model of `num_blocks` blocks, first to last.

        Windows start at multiples of `stride` before the point where the first is full, so that with window 2, stride 1
        they are {0}, {0, 1}, {1, 2}, ..., {last}: every block is held by as many windows as any other.
        """
        spans: list[range] = []
        for end in count(self.stride, self.stride):
            span = range(max(0, end - self.window), min(end, num_blocks))
            if not span:
                break
            spans.append(span)
        windows = []
        for position, span in enumerate(spans):
            before = spans[position - 1].stop if position else 0
            after = spans[position + 1].start if position + 1 < len(spans) else num_blocks
            windows.append(Window(span, range(before, span.stop), range(span.start, min(after, span.stop))))
        return windows
