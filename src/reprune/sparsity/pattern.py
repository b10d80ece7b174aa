"""Which weights may survive together (unstructured, or at most `kept` in every `group`), and exact keep masks.

Every mask is chosen by count, never by comparison with a threshold: a threshold takes ties with it, and low-precision
weights have many. Ties are broken by position, the earlier one is removed first.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from reprune.errors import ConfigError, NumericalError

UNSTRUCTURED = "unstructured"
EXAMPLES = f"Use sparsity.pattern={UNSTRUCTURED}, or kept:group such as sparsity.pattern=2:4"


@dataclass(frozen=True)
class Pattern:
    """Unstructured (group is None), or kept:group along the input dimension, as in 2:4.

    Groups start at column 0. Where the columns are not a multiple of `group`, the short last group, too, keeps at most
    `kept` weights: 2:4 on 10 columns keeps both of the last two.

    Attributes:
        kept: weights that survive in every group, at least 1.
        group: consecutive weights of a row that form a group, more than `kept`.
    """

    kept: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        if (self.kept is None) != (self.group is None):
            raise ConfigError(f"sparsity.pattern={self.kept}:{self.group}: needs both numbers. {EXAMPLES}.")
        if self.kept is None or self.group is None:
            return
        if self.kept < 1:
            raise ConfigError(f"sparsity.pattern={self}: keeps nothing; kept must be at least 1. {EXAMPLES}.")
        if self.kept >= self.group:
            raise ConfigError(
                f"sparsity.pattern={self}: means at most {self.kept} kept of every {self.group}, which removes "
                f"nothing; kept must be smaller than group. {EXAMPLES}."
            )

    @classmethod
    def parse(cls, text: str | int) -> "Pattern":
        """Read `unstructured` or `kept:group`.

        Raises:
            ConfigError: text is neither, or the numbers break 1 <= kept < group.
        """
        text = str(text)
        if text == UNSTRUCTURED:
            return cls()
        if match := re.fullmatch(r"(\d+):(\d+)", text):
            return cls(int(match[1]), int(match[2]))
        if text.isdecimal() and int(text) >= 60:
            # YAML 1.1 takes digits with a colon for a number to base 60.
            kept, group = divmod(int(text), 60)
            raise ConfigError(
                f"sparsity.pattern={text}: YAML reads an unquoted {kept}:{group} as the number {text}. Quote it, as in "
                f'pattern: "{kept}:{group}".'
            )
        raise ConfigError(f"sparsity.pattern={text}: not a pattern. {EXAMPLES}.")

    def __str__(self) -> str:
        return UNSTRUCTURED if self.group is None else f"{self.kept}:{self.group}"

    @property
    def sparsity(self) -> float | None:
        """Fraction that a full group removes; None if unstructured."""
        return None if self.kept is None or self.group is None else 1 - self.kept / self.group

    def short_group(self, columns: int) -> int:
        """Return how many last columns do not fill a group; 0 if there are none, or if unstructured."""
        return 0 if self.group is None else columns % self.group


def removed_count(total: int, sparsity: float) -> int:
    """Return how many of `total` weights go: round(sparsity * total), where Python rounds a half to even."""
    return round(sparsity * total)


def keep_highest(score: Tensor, removed: int) -> Tensor:
    """Keep all but exactly `removed` of the last dimension, those with the lowest score.

    Ties go by position: of equal scores the earlier one is removed first, as after a stable sort.

    Args:
        score: (..., n), any float dtype; compared in float32; not modified.
        removed: in [0, n].

    Returns:
        Bool, the shape of score, True where it survives.

    Raises:
        NumericalError: a score is NaN.
        ValueError: removed is not in [0, n].
    """
    count = score.shape[-1]
    if not 0 <= removed <= count:
        raise ValueError(f"cannot remove {removed} of {count}")
    score = _checked(score)
    if removed == 0:
        return torch.ones_like(score, dtype=torch.bool)
    # Selection and a count of the ties take about a seventh of the time of a stable sort and choose the same.
    threshold = score.topk(removed, largest=False, sorted=False).values.amax(-1, keepdim=True)
    keep = score > threshold
    ties = score == threshold
    above = keep.sum(-1, keepdim=True) + ties.sum(-1, keepdim=True) - (count - removed)  # ties that must go
    return keep | (ties & (ties.cumsum(-1) > above))


def keep_groups(score: Tensor, pattern: Pattern) -> Tensor:
    """Keep the `pattern.kept` highest scores in every group of the last dimension; ties go as in keep_highest.

    Args:
        score: (rows, columns), not negative, any float dtype; compared in float32; not modified.
        pattern: kept:group; a short last group keeps at most `kept`.

    Returns:
        (rows, columns) bool, True where a weight survives.

    Raises:
        NumericalError: a score is NaN.
        ValueError: pattern is unstructured.
    """
    if pattern.kept is None or pattern.group is None:
        raise ValueError("an unstructured pattern has no groups")
    columns = score.shape[1]
    if missing := -columns % pattern.group:
        # Padding sorts below every weight: it is removed first and leaves the short group what it may remove itself.
        score = torch.nn.functional.pad(score, (0, missing), value=-torch.inf)
    keep = keep_highest(score.unflatten(1, (-1, pattern.group)), pattern.group - pattern.kept)
    return keep.flatten(1)[:, :columns].contiguous()


def _checked(score: Tensor) -> Tensor:
    score = score.float()
    if score.isnan().any():
        raise NumericalError(
            f"{int(score.isnan().sum())} of {score.numel()} pruning scores are NaN: a weight or a calibration input is "
            f"not finite, or overflows. Use model.dtype=float32 or bfloat16, and check the model's dense perplexity."
        )
    return score
