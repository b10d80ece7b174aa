"""The same sparsity in every block."""

import math
from dataclasses import dataclass

from reprune.errors import ConfigError
from reprune.sparsity.pattern import Pattern

TOLERANCE = 1e-3  # a ratio typed with three digits, as 0.667 for 1:3, agrees with its pattern


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Settings; each is explained in conf/sparsity/uniform.yaml."""

    ratio: float | None
    pattern: str

    def __post_init__(self) -> None:
        pattern, ratio = Pattern.parse(self.pattern), self.ratio
        if ratio is None:
            if pattern.sparsity is None:
                raise ConfigError(
                    f"sparsity.ratio=null with sparsity.pattern={pattern}: the pattern does not say how much to "
                    f"remove. Set sparsity.ratio, or an N:M pattern such as sparsity.pattern=2:4."
                )
            return
        _check_ratio(ratio)
        if pattern.sparsity is not None and abs(ratio - pattern.sparsity) > TOLERANCE:
            raise ConfigError(
                f"sparsity.ratio={ratio:g} with sparsity.pattern={pattern}: {pattern} removes {pattern.sparsity:.4g} "
                f"of the weights. Set sparsity.ratio={pattern.sparsity:.4g} (or null to take it from the pattern), or "
                f"sparsity.pattern=unstructured."
            )

    def allocate(self, num_blocks: int) -> list[float]:
        """Return the sparsity of every block, each in [0, 1); for N:M the fraction that the pattern removes."""
        exact = self.resolved_pattern().sparsity
        ratio = self.ratio if exact is None else exact
        assert ratio is not None  # __post_init__ saw to it
        return [ratio] * num_blocks

    def resolved_pattern(self) -> Pattern:
        """Return the pattern that survivors form."""
        return Pattern.parse(self.pattern)


def _check_ratio(ratio: float) -> None:
    """Raise ConfigError unless ratio is a fraction in [0, 1)."""
    given = f"sparsity.ratio={ratio:g}"
    if not math.isfinite(ratio):
        raise ConfigError(
            f"{given}: not a finite number; it is the fraction of weights to remove. Set sparsity.ratio=0.5."
        )
    if ratio < 0:
        raise ConfigError(f"{given}: is negative; it is the fraction of weights to remove, in [0, 1).")
    if ratio == 1:
        raise ConfigError(f"{given}: removes everything; the fraction of weights to remove must lie in [0, 1).")
    if ratio > 1:
        guess = f" Set sparsity.ratio={ratio / 100:g}." if ratio < 100 else ""
        raise ConfigError(f"{given}: must lie in [0, 1): it is a fraction, not percent.{guess}")
