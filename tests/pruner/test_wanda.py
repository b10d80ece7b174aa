import torch

from reprune.pruner.wanda import Wanda
from reprune.sparsity.pattern import Pattern
from reprune.statistics import InputNorm


def with_norms(norms):
    stat = InputNorm(len(norms), "cpu")
    stat.update(torch.diag(torch.tensor(norms)).unsqueeze(0))
    return stat


def test_a_large_input_outweighs_a_small_weight():
    weight = torch.tensor([[0.1, 1.0, 0.5, 2.0]])
    result = Wanda().prune(weight, with_norms([100.0, 1.0, 1.0, 1.0]), 0.5, Pattern())
    torch.testing.assert_close(result.weight, torch.tensor([[0.1, 0.0, 0.0, 2.0]]), rtol=0, atol=0)
    assert result.damping is None


def test_every_row_gives_the_same_count():
    torch.manual_seed(0)
    weight = torch.randn(9, 13) * torch.arange(1, 10).unsqueeze(1) ** 3  # rows of very different size
    keep = Wanda().prune(weight, with_norms([1.0] * 13), 0.6, Pattern()).keep
    assert ((~keep).sum(1) == 8).all()  # round(7.8)


def test_survivors_score_at_least_as_high_as_the_removed():
    torch.manual_seed(0)
    weight, norms = torch.randn(5, 12), torch.rand(12) + 0.1
    keep = Wanda().prune(weight, with_norms(norms.tolist()), 0.5, Pattern()).keep
    score = (weight.abs() * norms).double()
    for row in range(5):
        assert score[row][keep[row]].min() >= score[row][~keep[row]].max()


def test_wanda_ties():
    keep = Wanda().prune(torch.ones(2, 4), with_norms([1.0] * 4), 0.5, Pattern()).keep
    assert keep.tolist() == [[False, False, True, True]] * 2


def test_a_dead_feature_goes_first():
    torch.manual_seed(0)
    keep = Wanda().prune(100 * torch.ones(3, 4), with_norms([1.0, 1.0, 0.0, 1.0]), 0.25, Pattern()).keep
    assert keep.tolist() == [[True, True, False, True]] * 3
