import pytest
import torch

from reprune.errors import ConfigError, NumericalError
from reprune.sparsity.pattern import Pattern, keep_groups, keep_highest, removed_count


@pytest.mark.parametrize("text", ["unstructured", "2:4", "1:4", "3:4", "4:8", "16:32"])
def test_parse_and_str_are_inverse(text):
    assert str(Pattern.parse(text)) == text


def test_parse_gives_the_numbers():
    assert Pattern.parse("unstructured") == Pattern(None, None)
    assert Pattern.parse("1:4") == Pattern(1, 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4:2", "kept must be smaller than group"),
        ("4:4", "removes nothing"),
        ("0:4", "keeps nothing"),
        ("2-4", "not a pattern"),
        ("2:4:8", "not a pattern"),
        ("", "not a pattern"),
        ("12", "not a pattern"),
        ("-2:4", "not a pattern"),
        ("Unstructured", "sparsity.pattern=unstructured"),
        (124, 'unquoted 2:4 as the number 124. Quote it, as in pattern: "2:4"'),
        ("248", "unquoted 4:8"),
    ],
)
def test_parse_errors_name_the_key_and_the_rule(text, says):
    with pytest.raises(ConfigError) as caught:
        Pattern.parse(text)
    assert f"sparsity.pattern={text}" in str(caught.value)
    assert says in str(caught.value)


def test_half_a_pattern_is_refused():
    with pytest.raises(ConfigError, match="needs both numbers"):
        Pattern(kept=2)


@pytest.mark.parametrize(("text", "sparsity"), [("2:4", 0.5), ("1:4", 0.75), ("3:4", 0.25), ("unstructured", None)])
def test_sparsity(text, sparsity):
    assert Pattern.parse(text).sparsity == sparsity


@pytest.mark.parametrize(
    ("text", "columns", "short"), [("2:4", 8, 0), ("2:4", 10, 2), ("4:8", 7, 7), ("unstructured", 7, 0)]
)
def test_short_group(text, columns, short):
    assert Pattern.parse(text).short_group(columns) == short


def test_removed_count_rounds_half_to_even():
    assert [removed_count(total, 0.5) for total in (4, 5, 6, 7)] == [2, 2, 3, 4]
    assert removed_count(10, 0.29) == 3  # int(10 * 0.29) would be 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(37,), (5, 11)])
def test_keep_highest_equals_a_stable_sort(dtype, shape):
    torch.manual_seed(0)
    score = torch.randint(0, 5, shape).to(dtype)  # full of ties
    for removed in range(shape[-1] + 1):
        order = score.float().sort(dim=-1, stable=True).indices
        expected = torch.ones(shape, dtype=torch.bool).scatter(-1, order[..., :removed], False)
        assert keep_highest(score, removed).equal(expected)


def test_keep_highest_leaves_infinite_scores_and_takes_constant_ones_in_order():
    assert keep_highest(torch.tensor([torch.inf, 1.0, torch.inf, 0.0]), 3).tolist() == [False, False, True, False]
    assert keep_highest(torch.full((6,), 0.1), 4).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("removed", [-1, 5])
def test_keep_highest_refuses_an_impossible_count(removed):
    with pytest.raises(ValueError, match="cannot remove"):
        keep_highest(torch.ones(4), removed)


def test_nan_scores_are_an_error():
    score = torch.ones(2, 8)
    score[1, 3] = torch.nan
    with pytest.raises(NumericalError, match="1 of 16 pruning scores are NaN"):
        keep_highest(score, 2)
    with pytest.raises(NumericalError, match="NaN"):
        keep_groups(score, Pattern(2, 4))


@pytest.mark.parametrize("pattern", [Pattern(2, 4), Pattern(1, 4), Pattern(3, 4), Pattern(4, 8), Pattern(1, 3)])
@pytest.mark.parametrize("columns", [1, 2, 8, 11, 24])
@pytest.mark.parametrize("levels", [3, 1000])
def test_keep_groups_keeps_the_highest_of_every_group(pattern, columns, levels):
    torch.manual_seed(0)
    score = torch.randint(0, levels, (6, columns)).float()
    keep = keep_groups(score, pattern)
    for row in range(6):
        for start in range(0, columns, pattern.group):
            members = score[row, start : start + pattern.group].tolist()
            order = sorted(range(len(members)), key=lambda i: (members[i], i))
            gone = set(order[: max(0, len(members) - pattern.kept)])
            assert keep[row, start : start + pattern.group].tolist() == [i not in gone for i in range(len(members))]


def test_a_short_group_of_two_keeps_both_in_2_of_4():
    assert keep_groups(torch.zeros(1, 6), Pattern(2, 4)).tolist() == [[False, False, True, True, True, True]]


def test_keep_groups_needs_groups():
    with pytest.raises(ValueError, match="unstructured"):
        keep_groups(torch.ones(2, 4), Pattern())
