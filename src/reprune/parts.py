"""What calibration is made of: sequences of one or more corpora, and what each is used for.

Source: Shin et al., EMNLP 2024, arXiv:2406.15524, appendix C: generated text is added for reconstruction only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from reprune.errors import ConfigError


class Use(Enum):
    """What a calibration sequence is for: the pruner's statistics, or reconstruction."""

    mask = "mask"
    recon = "recon"


@dataclass(frozen=True)
class Part:
    """Some of the calibration sequences.

    Attributes:
        corpus: its name, a key of Plan.corpora.
        count: sequences.
        use: what they are for.
    """

    corpus: str
    count: int
    use: frozenset[Use]


def in_rows(parts: Sequence[Part]) -> list[Part]:
    """Return the parts that have sequences in the order of the stream's rows: mask only, both, recon only.

    So the rows that masks are chosen by are a slice, and those that reconstruction learns from are one.
    """
    order = [frozenset({Use.mask}), frozenset(Use), frozenset({Use.recon})]
    return sorted((part for part in parts if part.count), key=lambda part: order.index(part.use))


def rows(parts: Sequence[Part], use: Use) -> slice:
    """Return the rows of the stream that are for a use; the parts are in order."""
    used = [use in part.use for part in parts for _ in range(part.count)]
    return slice(used.index(True), used.index(True) + sum(used)) if any(used) else slice(0, 0)


def shares(count: int, weights: Sequence[float]) -> list[int]:
    """Share out a count by weights, to whole numbers, by largest remainder; the first of equals gets more."""
    exact = [count * weight / sum(weights) for weight in weights]
    given = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: given[i] - exact[i])  # stable
    for i in by_remainder[: count - sum(given)]:
        given[i] += 1
    return given


def checked_use(key: str, use: Sequence[Use]) -> frozenset[Use]:
    """Return a use as a set.

    Raises:
        ConfigError: it is empty or names one twice.
    """
    if not use or len(set(use)) != len(use):
        raise ConfigError(f"{key}={[item.value for item in use]}: must name mask, recon or both, each once.")
    return frozenset(use)
