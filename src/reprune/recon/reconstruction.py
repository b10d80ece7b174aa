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
from typing import Any

from reprune.errors import ConfigError

ALL = "all"  # as a window: every block of the model


class Solver(Enum):
    """How a unit is brought closer to its target."""

    none = "none"
    least_squares = "least_squares"
    adam = "adam"


class Unit(Enum):
    """What is optimised as one piece; submodule is attention, then feed-forward, each with its residual."""

    linear = "linear"
    submodule = "submodule"
    block = "block"


class Init(Enum):
    """Where gradient steps start: at the pruner's weights, or at the closed-form solution for each linear."""

    pruner = "pruner"
    least_squares = "least_squares"


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
    """What a step lowers: the mean squared error; over the target's mean square; each token's over its own norm."""

    mse = "mse"
    relative = "relative"
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
    window: Any  # int or "all"; Any because OmegaConf has no union of the two
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
    anchor: float
    init: Init
    keep_best: KeepBest
    evaluations: int
    patience: int | None
    heldout_evaluations: int
    checkpointing: bool
    damping: float
    tolerance: float
    max_iterations: int

    def __post_init__(self) -> None:
        def require(holds: bool, key: str, rule: str) -> None:
            if not holds:
                raise ConfigError(f"recon.{key}={getattr(self, key)}: {rule}")

        whole = isinstance(self.window, int) and not isinstance(self.window, bool)
        require(whole or self.window == ALL, "window", f"must be a number of blocks, or {ALL}.")
        require(self.window == ALL or self.window >= 1, "window", f"must be at least 1 block, or {ALL}.")
        require(
            self.stride >= 1 and (self.window == ALL or self.stride <= self.window),
            "stride",
            f"must be between 1 and recon.window={self.window}, or blocks would be left out.",
        )
        self._check_solver()
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
        require(self.anchor >= 0, "anchor", "must not be negative.")
        require(self.evaluations >= 1, "evaluations", "must be at least 1 (the end of training).")
        require(self.patience is None or self.patience >= 1, "patience", "must be at least 1 evaluation, or null.")
        require(
            self.patience is None or self.keep_best is not KeepBest.none,
            "patience",
            "waits for a better iterate, and recon.keep_best=none looks for none. Use recon.keep_best=calib.",
        )
        require(self.heldout_evaluations >= 0, "heldout_evaluations", "must not be negative.")
        require(0 <= self.damping < math.inf, "damping", "is a fraction of the Gram matrix' diagonal, at least 0.")
        require(0 < self.tolerance < 1, "tolerance", "is a fraction of the right-hand side's norm, in (0, 1).")
        require(self.max_iterations >= 1, "max_iterations", "must be at least 1.")

    def _check_solver(self) -> None:
        """Refuse what solver and unit cannot do together."""
        if self.solver is Solver.least_squares and self.unit is not Unit.linear:
            raise ConfigError(
                f"recon.solver=least_squares with recon.unit={self.unit.value}: only a linear has a closed form. Use "
                f"recon.unit=linear, or recon.solver=adam."
            )
        if self.solver is not Solver.none and self.unit is not Unit.block and self.window != 1:
            raise ConfigError(
                f"recon.window={self.window} with recon.unit={self.unit.value}: windows hold whole blocks. Use "
                f"recon.unit=block, or recon.window=1."
            )
        if self.solves_linears and self.inputs is Inputs.dense:
            raise ConfigError(
                "recon.inputs=dense with least squares: the closed form learns from what the linear will see, the "
                "pruned stream. Use recon.inputs=pruned."
            )
        by_heldout = self.keep_best is KeepBest.heldout or self.heldout_evaluations
        if self.trains and self.unit is not Unit.block and by_heldout:
            raise ConfigError(
                f"recon.unit={self.unit.value}: held-out errors are those of whole blocks. Use "
                f"recon.keep_best=calib and recon.heldout_evaluations=0, or recon.unit=block."
            )

    @property
    def trains(self) -> bool:
        """Whether gradient steps are taken."""
        return self.solver is Solver.adam

    @property
    def solves_linears(self) -> bool:
        """Whether each linear gets the closed-form solution for its mask as its block enters."""
        return self.solver is Solver.least_squares or (self.trains and self.init is Init.least_squares)

    @property
    def changes(self) -> bool:
        """Whether any weight changes after pruning."""
        return self.solver is not Solver.none

    @property
    def overlaps(self) -> bool:
        """Whether a block is in several windows, or in one with others."""
        return self.window != 1

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
        window, stride = (num_blocks, num_blocks) if self.window == ALL else (self.window, self.stride)
        spans: list[range] = []
        for end in count(stride, stride):
            span = range(max(0, end - window), min(end, num_blocks))
            if not span:
                break
            spans.append(span)
        windows = []
        for position, span in enumerate(spans):
            before = spans[position - 1].stop if position else 0
            after = spans[position + 1].start if position + 1 < len(spans) else num_blocks
            windows.append(Window(span, range(before, span.stop), range(span.start, min(after, span.stop))))
        return windows
