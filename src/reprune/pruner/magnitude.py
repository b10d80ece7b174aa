"""Magnitude: the smallest weights of the matrix go.

Source: Han et al., NeurIPS 2015, arXiv:1506.02626, section 3, one matrix at a time. Difference from the common code,
which compares with the int(size * sparsity)-th smallest magnitude and so removes one weight too many and every tie:
exactly round(sparsity * size) weights go, ties in row-major order.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from reprune.interfaces import Pruned
from reprune.sparsity.pattern import Pattern, keep_groups, keep_highest, removed_count


@dataclass(frozen=True, kw_only=True)
class Magnitude:
    """No settings."""

    statistic: ClassVar[type[Any] | None] = None

    @torch.no_grad()
    def prune(self, weight: Tensor, stat: None, sparsity: float, pattern: Pattern) -> Pruned:
        """Choose the survivors of one linear; their values are left as they are.

        Args:
            weight: (out, in), any float dtype; not modified.
            stat: unused.
            sparsity: fraction of the matrix to remove, in [0, 1); ignored when pattern is N:M.
            pattern: unstructured or N:M.

        Raises:
            NumericalError: a weight is NaN.
        """
        score = weight.abs()
        if pattern.group is None:
            keep = keep_highest(score.flatten(), removed_count(weight.numel(), sparsity)).view_as(weight)
        else:
            keep = keep_groups(score, pattern)
        return Pruned(weight.masked_fill(~keep, 0), keep)
