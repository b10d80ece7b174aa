import numpy as np
import pytest
from scipy import stats

from reprune.eval.paired import mean_of, paired


def test_binary_values_against_scipy():
    first = [1] * 50 + [1] * 12 + [0] * 3 + [0] * 35
    second = [1] * 50 + [0] * 12 + [1] * 3 + [0] * 35
    got = paired(first, second)
    assert got.delta == pytest.approx(-0.09)
    assert got.p == pytest.approx(stats.binomtest(3, 15).pvalue)
    assert got.low < got.delta < got.high < 0


def test_other_values_against_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=40), rng.normal(0.3, size=40)
    got, wanted = paired(x.tolist(), y.tolist()), stats.ttest_rel(y, x)
    assert got.p == pytest.approx(wanted.pvalue)
    interval = wanted.confidence_interval(0.95)
    assert (got.low, got.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_no_difference_is_not_certainty():
    got = paired([1, 0, 1], [1, 0, 1])
    assert (got.delta, got.p) == (0, 1)
    assert got.low < 0 < got.high


def test_the_interval_covers():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(400):
        u = rng.random(100)
        got = paired((u < 0.6).astype(float).tolist(), ((u > 0.1) & (u < 0.65)).astype(float).tolist())
        hits += got.low <= -0.05 <= got.high
    assert hits / 400 > 0.92


def test_the_mean_of_tasks():
    one, two = paired([1] * 20 + [0] * 80, [0] * 20 + [0] * 80), paired([0] * 100, [1] * 10 + [0] * 90)
    got = mean_of([one, two])
    assert got.delta == pytest.approx(-0.05)
    assert got.stderr == pytest.approx((one.stderr**2 + two.stderr**2) ** 0.5 / 2)
    assert got.low < got.delta < got.high
