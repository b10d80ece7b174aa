"""Wanda: score each weight by its size times the norm of the input feature it multiplies.

Source: Sun et al., ICLR 2024, arXiv:2306.11695, eq. 1 and section 3. Differences from the authors' code: round(sparsity
* columns) weights go from each row where it takes int(sparsity * columns), one less where the fraction is above a half;
and their n:m counts removed weights, a pattern here counts kept ones.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from reprune.interfaces import Pruned
from reprune.sparsity.pattern import Pattern, keep_groups, keep_highest, removed_count
from reprune.statistics import InputNorm


@dataclass(frozen=True, kw_only=True)
class Wanda:
    """No settings."""

    statistic: ClassVar[type[Any] | None] = InputNorm

    @torch.no_grad()
    def prune(self, weight: Tensor, stat: InputNorm, sparsity: float, pattern: Pattern) -> Pruned:
        """Choose the survivors of one linear, row by row; their values are left as they are.

        Args:
            weight: (out, in), any float dtype; not modified.
            stat: norms over all calibration tokens, (in,), float32.
            sparsity: fraction of each row to remove, in [0, 1); ignored when pattern is N:M.
            pattern: unstructured or N:M.

        Raises:
            NumericalError: a score is NaN.
            ValueError: stat saw another number of input features than weight has.
        """
        norm = stat.norm
        if len(norm) != weight.shape[1]:
            raise ValueError(f"stat has {len(norm)} features, weight has {weight.shape[1]}")
        score = weight.float().abs() * norm  # float32: bfloat16 has too few distinct values to rank a row
        if pattern.group is None:
            keep = keep_highest(score, removed_count(weight.shape[1], sparsity))
        else:
            keep = keep_groups(score, pattern)
        return Pruned(weight.masked_fill(~keep, 0), keep)
