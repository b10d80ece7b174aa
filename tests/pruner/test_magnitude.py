import torch

from reprune.pruner.magnitude import Magnitude
from reprune.sparsity.pattern import Pattern


def test_the_smallest_of_the_whole_matrix_go():
    weight = torch.tensor([[0.1, -0.2, 3.0, 4.0], [-5.0, 6.0, 0.3, -7.0]])
    result = Magnitude().prune(weight, None, 0.375, Pattern())
    assert result.weight.tolist() == [[0.0, 0.0, 3.0, 4.0], [-5.0, 6.0, 0.0, -7.0]]
    assert result.damping is None


def test_the_smallest_of_every_group_go():
    weight = torch.tensor([[0.1, -0.2, 3.0, 4.0, 1.0, -9.0, 8.0, 2.0]])
    keep = Magnitude().prune(weight, None, 0.5, Pattern(2, 4)).keep
    assert keep.tolist() == [[False, False, True, True, False, True, True, False]]


def test_ties_go_in_row_major_order():
    keep = Magnitude().prune(torch.ones(2, 3), None, 0.5, Pattern()).keep
    assert keep.tolist() == [[False, False, False], [True, True, True]]


def test_ties_of_bfloat16_are_counted_exactly():
    torch.manual_seed(0)
    weight = (torch.randn(64, 64) * 0.02).bfloat16()
    assert len(weight.abs().unique()) < 1000  # 4096 weights
    assert (~Magnitude().prune(weight, None, 0.3, Pattern()).keep).sum() == round(0.3 * 4096)
