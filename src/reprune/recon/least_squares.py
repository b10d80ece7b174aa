"""The closed form: for any mask, the kept weights of one linear that bring its output closest to a target.

Row by row, w minimises ||X w - y||^2 over its kept entries, where X is what the linear sees and y what it should give.
A pull toward the weights that came in keeps directions that the text hardly shows from running away: in sums in float32
a few massive activations drown them. Only G = X^T X and, where the target comes from other inputs, C = X_dense^T X
enter, so that the number of tokens does not matter. All rows are solved at once by conjugate gradients on the kept
entries.

Source: SparseGPT (Frantar and Alistarh, arXiv:2301.00774, section 3.1) states the problem and approximates it, since
one inverse a row is dear. With a dense target it is that of GPTAQ (arXiv:2504.02692), here for masks, not for rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Solution:
    """Weights on the kept entries, and how the solver got there.

    Attributes:
        weight: (out, in) float32, exactly zero where keep is False.
        start, loss: sum of ||X w - y||^2 over rows, over that of ||X w_dense||^2, for the weights that came in and for
            these; never higher than at the start. With `cross`, less a constant: ||y||^2 is not known.
        iterations: conjugate gradient steps taken.
        residual: largest over rows of the preconditioned residual over that of w = 0.
    """

    weight: Tensor
    start: float
    loss: float
    iterations: int
    residual: float


@torch.no_grad()
def least_squares(
    dense: Tensor,
    start: Tensor,
    keep: Tensor,
    gram: Tensor,
    cross: Tensor | None,
    damping: float,
    tolerance: float,
    max_iterations: int,
) -> Solution:
    """Solve for the kept weights of a linear.

    Computed in float64: Gram matrices of hidden states are ill-conditioned. Where G is rank-deficient on the kept
    entries there are many minimisers, and the one nearest the start in its own directions is found; dead inputs keep
    the weights they start with.

    Args:
        dense: (out, in), the weights of the dense model; not modified.
        start: (out, in), where to start, such as a pruner's solution; not modified.
        keep: (out, in) bool, True where a weight survives.
        gram: (in, in), X^T X, symmetric, any positive scale.
        cross: (in, in), X_dense^T X at the same scale, for the target X_dense w_dense; None: the target is X w_dense.
        damping: pull toward the start, a fraction of the diagonal of G; 0 gives the plain minimiser. Unlike SparseGPT's
            it scales with each input's own square, so that one massive activation does not damp all others.
        tolerance: stop when every row's residual is below this fraction of what it would be for w = 0.
        max_iterations: stop after so many steps in any case.
    """
    precision = torch.float32 if gram.device.type == "mps" else torch.float64  # mps has no float64
    w0, w, gram = dense.to(precision), start.to(precision) * keep, gram.to(precision)
    target = w0 @ (gram if cross is None else cross.to(precision))
    scale = ((w0 @ gram) * w0).sum()
    diagonal = gram.diagonal() * (1 + damping)
    pull = gram.diagonal() * damping
    right = target + w * pull
    inverse = torch.where(diagonal > 0, 1 / diagonal.clamp_min(torch.finfo(precision).tiny), 0)

    def loss(weight: Tensor) -> float:
        value = scale + ((weight @ gram) * weight).sum() - 2 * (weight * target).sum()
        return (value / scale).item() if scale > 0 else 0.0

    first = loss(w)
    residual = (right - w @ gram - w * pull) * keep
    size = (right * keep).square().mul(inverse).sum(1)  # of the residual of w = 0
    direction = residual * inverse
    product = (residual * direction).sum(1)
    iterations = 0
    while iterations < max_iterations and bool((product > tolerance**2 * size).any()):
        image = direction @ gram + direction * pull
        curvature = (direction * image).sum(1)
        going = curvature > 0  # a row that has arrived has no direction left
        step = torch.where(going, product / curvature.where(going, torch.ones_like(curvature)), 0).unsqueeze(1)
        w += step * direction
        residual -= (step * image) * keep
        preconditioned = residual * inverse
        following = (residual * preconditioned).sum(1)
        ratio = torch.where(product > 0, following / product.where(product > 0, torch.ones_like(product)), 0)
        direction = preconditioned + ratio.unsqueeze(1) * direction
        product = following
        iterations += 1
    last = loss(w)
    if last > first:  # rounding alone, where the start was the solution
        w, last = start.to(precision) * keep, first
    left = torch.where(size > 0, product / size.where(size > 0, torch.ones_like(size)), 0).max().sqrt().item()
    return Solution(w.float(), first, last, iterations, left)
