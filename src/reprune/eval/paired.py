"""Whether a difference between two models on the same items is more than noise.

Source: McNemar (1947) in its exact form, a binomial test on the items that exactly one of the models gets right; Bonett
and Price (2012) for the interval, which keeps its coverage where few items differ, and does not collapse to a point
where none does. For values that are not 0 or 1: a paired t-test.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95  # of the confidence intervals
NOISE = 0.05  # a p-value above this is called noise


@dataclass(frozen=True)
class Difference:
    """A paired difference.

    Attributes:
        delta: mean of second minus first.
        low, high: ends of the 95 % confidence interval.
        p: two-sided p-value of no difference.
        stderr: the standard error that the interval comes from.
    """

    delta: float
    low: float
    high: float
    p: float
    stderr: float


def paired(first: list[float], second: list[float]) -> Difference:
    """Compare two models item by item.

    Args:
        first: one value an item, of the dense model.
        second: the same items in the same order, of the pruned model.
    """
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    n = len(x)
    delta = float((y - x).mean())
    if np.isin(x, (0, 1)).all() and np.isin(y, (0, 1)).all():
        won, lost = int(((y == 1) & (x == 0)).sum()), int(((y == 0) & (x == 1)).sum())
        p = float(stats.binomtest(won, won + lost).pvalue) if won + lost else 1.0
        up, down = (won + 1) / (n + 2), (lost + 1) / (n + 2)
        middle, stderr = up - down, math.sqrt((up + down - (up - down) ** 2) / (n + 2))
        reach = float(stats.norm.ppf(0.5 + LEVEL / 2)) * stderr
        return Difference(delta, max(middle - reach, -1.0), min(middle + reach, 1.0), p, stderr)
    spread = float((y - x).std(ddof=1)) if n > 1 else math.inf
    if spread == 0:
        return Difference(delta, delta, delta, 1.0 if delta == 0 else 0.0, 0.0)
    stderr = spread / math.sqrt(n)
    if not math.isfinite(stderr):
        return Difference(delta, -math.inf, math.inf, 1.0, stderr)
    reach = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1)) * stderr
    p = float(2 * stats.t.sf(abs(delta) / stderr, n - 1))
    return Difference(delta, delta - reach, delta + reach, p, stderr)


def mean_of(differences: list[Difference]) -> Difference:
    """Average differences on disjoint sets of items, each set with the same weight, by a normal approximation."""
    count = len(differences)
    delta = sum(item.delta for item in differences) / count
    stderr = math.sqrt(sum(item.stderr**2 for item in differences)) / count
    reach = float(stats.norm.ppf(0.5 + LEVEL / 2)) * stderr
    p = float(2 * stats.norm.sf(abs(delta) / stderr)) if stderr else float(delta == 0)
    return Difference(delta, delta - reach, delta + reach, p, stderr)
