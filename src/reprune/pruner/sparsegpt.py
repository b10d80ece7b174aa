"""SparseGPT: remove weights column by column, and let the columns still to come make up for each.

Source: Frantar and Alistarh, ICML 2023, arXiv:2301.00774, section 3 and algorithm 1. Differences from the authors'
code: exactly round(sparsity * rows * width) weights of each column block go, ties column by column (it removes one
more, and all ties); a dead input feature scores 0, so that its weights go first, but never changes the count (it zeroes
the column on top of the mask); groups of an N:M pattern never straddle column blocks, and a short last group has a
stated rule; damping as in `Hessian.factor`.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from reprune.errors import ConfigError
from reprune.interfaces import Pruned
from reprune.sparsity.pattern import Pattern, keep_groups, keep_highest, removed_count
from reprune.statistics import Factor, Hessian

STRIP = 32  # columns that are brought up to date by one matrix product; within, one by one


@dataclass(frozen=True, kw_only=True)
class SparseGPT:
    """Settings; each is explained in conf/pruner/sparsegpt.yaml."""

    statistic: ClassVar[type[Any] | None] = Hessian
    damping: float
    max_damping: float
    column_block: int

    def __post_init__(self) -> None:
        if not 0 < self.damping < math.inf:
            raise ConfigError(
                f"pruner.damping={self.damping:g}: is a fraction of the mean Hessian diagonal and must be positive. "
                f"Set pruner.damping=0.01."
            )
        if not self.damping <= self.max_damping < math.inf:
            raise ConfigError(
                f"pruner.max_damping={self.max_damping:g} with pruner.damping={self.damping:g}: damping starts at the "
                f"second and may rise to the first. Set pruner.max_damping={self.damping:g} or more."
            )
        if self.column_block < 1:
            raise ConfigError(f"pruner.column_block={self.column_block}: must be at least 1 column.")

    def problem(self, pattern: Pattern) -> str | None:
        """Return why these settings do not go with a pattern, None if they do."""
        if pattern.group is None or self.column_block % pattern.group == 0:
            return None
        return (
            f"pruner.column_block={self.column_block} with sparsity.pattern={pattern}: a group of {pattern.group} "
            f"would straddle two column blocks. Set pruner.column_block to a multiple of {pattern.group}, such as "
            f"{math.ceil(self.column_block / pattern.group) * pattern.group}."
        )

    @torch.no_grad()
    def prune(self, weight: Tensor, stat: Hessian, sparsity: float, pattern: Pattern) -> Pruned:
        """Choose the survivors of one linear and update them to make up for the others.

        Args:
            weight: (out, in), any float dtype; computed in float32; not modified.
            stat: Hessian over all calibration tokens, (in, in), float32.
            sparsity: fraction of each column block to remove, in [0, 1); ignored when pattern is N:M.
            pattern: unstructured or N:M.

        Raises:
            ConfigError: column_block is not a multiple of the pattern's group.
            NumericalError: a score is NaN, or the Hessian cannot be factorised.
            ValueError: stat saw another number of input features than weight has.
        """
        if problem := self.problem(pattern):
            raise ConfigError(problem)
        if len(stat.total) != weight.shape[1]:
            raise ValueError(f"stat has {len(stat.total)} features, weight has {weight.shape[1]}")
        if pattern.group is None and removed_count(weight.numel(), sparsity) == 0:
            return Pruned(weight.clone(), torch.ones_like(weight, dtype=torch.bool))
        factor = stat.factor(self.damping, self.max_damping)
        # Transposed, so that a column, which is what every step reads and writes, is contiguous. Always a copy.
        columns = weight.T.float().clone(memory_format=torch.contiguous_format)
        keep = torch.ones_like(columns, dtype=torch.bool)
        for start in range(0, len(columns), self.column_block):
            block = slice(start, min(start + self.column_block, len(columns)))
            errors = _prune_block(columns[block], keep[block], _part(factor, block), sparsity, pattern)
            columns[block.stop :].addmm_(factor.upper[block, block.stop :].T, errors, alpha=-1)
        pruned = columns.masked_fill_(~keep, 0).T.to(weight.dtype)
        return Pruned(pruned.contiguous(), keep.T.contiguous(), factor.damping)


def _part(factor: Factor, block: slice) -> Factor:
    return Factor(factor.upper[block, block], factor.dead[block], factor.damping)


def _prune_block(columns: Tensor, keep: Tensor, factor: Factor, sparsity: float, pattern: Pattern) -> Tensor:
    """Choose the survivors of one column block and update it in place, but for the zeros; (width, out) throughout.

    The authors' code, after each column, updates all columns to its right. Here a column is brought up to date only
    when its turn comes, from the errors of those to its left: by one matrix product up to the start of its strip, and
    by one matrix-vector product within the strip.

    Args:
        columns: transposed weights, in which all earlier blocks are made up for; modified.
        keep: filled.
        factor: of these columns.
        sparsity: of this block, unless pattern is N:M.
        pattern: unstructured or N:M.

    Returns:
        What was removed from each column, over the diagonal of the factor, (width, out); zero where a weight survives.
    """
    lower = factor.upper.T.contiguous()
    diagonal = lower.diagonal().unsqueeze(1)
    dead = factor.dead.unsqueeze(1)
    if pattern.group is None:
        score = _score(columns, diagonal, dead)
        keep.copy_(keep_highest(score.flatten(), removed_count(score.numel(), sparsity)).view_as(keep))
    errors = (~keep) / diagonal  # a column's turn multiplies it by its weights
    strip = pattern.group or STRIP
    for start in range(0, len(columns), strip):
        part = slice(start, min(start + strip, len(columns)))
        columns[part].addmm_(lower[part, :start], errors[:start], alpha=-1)
        if pattern.group is not None:
            # A group is chosen with everything to its left made up for.
            keep[part] = keep_groups(_score(columns[part], diagonal[part], dead[part]).T, pattern).T
            errors[part] = (~keep[part]) / diagonal[part]
        for column, error, index in zip(columns[part], errors[part], range(*part.indices(part.stop)), strict=True):
            if index > start:
                column.addmv_(errors[start:index].T, lower[index, start:index], alpha=-1)
            # Algorithm 1: w_j / [H^-1]_jj^Cholesky for what goes, 0 for what stays.
            error.mul_(column)
    return errors


def _score(columns: Tensor, diagonal: Tensor, dead: Tensor) -> Tensor:
    """Order weights as w^2 / [H^-1]_jj of the columns still to come does, by its root, which cannot overflow."""
    return (columns.abs() / diagonal).masked_fill_(dead, 0)
