import pytest

from reprune.errors import ConfigError
from reprune.parts import Part, Use, checked_use, in_rows, rows, shares

MASK, RECON, BOTH = frozenset({Use.mask}), frozenset({Use.recon}), frozenset(Use)


def test_rows_of_a_use_are_a_slice():
    parts = in_rows(
        [Part("a", 3, RECON), Part("b", 2, BOTH), Part("c", 4, MASK), Part("d", 0, BOTH), Part("e", 1, RECON)]
    )
    assert [part.corpus for part in parts] == ["c", "b", "a", "e"]
    assert (rows(parts, Use.mask), rows(parts, Use.recon)) == (slice(0, 6), slice(4, 10))


def test_a_use_without_sequences():
    parts = in_rows([Part("a", 3, RECON)])
    assert len(range(*rows(parts, Use.mask).indices(3))) == 0
    assert rows(parts, Use.recon) == slice(0, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 24, 100])
@pytest.mark.parametrize("weights", [[1], [1, 1], [2, 1, 1], [0.1, 0.7, 0.2], [5, 3, 1e-9]])
def test_shares_are_whole_and_close(count, weights):
    given = shares(count, weights)
    assert sum(given) == count
    for share, weight in zip(given, weights, strict=True):
        assert abs(share - count * weight / sum(weights)) < 1


def test_a_use_that_says_nothing():
    for use in ([], [Use.mask, Use.mask]):
        with pytest.raises(ConfigError, match=r"must name mask, recon or both"):
            checked_use("calib.use", use)
