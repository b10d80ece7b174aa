"""What a pruner may ask to gather from the inputs of a linear: the norm of every input feature, or the Hessian.

Linears that read the same input share one object, and with it one factorisation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reprune.errors import NumericalError

BAND = 128  # rows of a Hessian that one matrix product covers; 64 to 256 take the same time on 2 cores


class InputNorm:
    """Running sum of squares of every input feature over all tokens.

    Source: Sun et al., ICLR 2024, arXiv:2306.11695, eq. 1. The authors' code keeps the mean over sequences of the
    squared norm, which is this divided by one number for all features, so that the ranking is the same.

    Args:
        in_features: of the linear.
        device: where the sum is kept.
    """

    def __init__(self, in_features: int, device: torch.device | str) -> None:
        self.total = torch.zeros(in_features, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, inputs: Tensor) -> None:
        """Add a batch of inputs, (sequences, tokens, in_features), any float dtype; squared and summed in float32."""
        self.total += inputs.reshape(-1, len(self.total)).float().square().sum(0)

    @property
    def norm(self) -> Tensor:
        """L2 norm of every feature over all tokens, (in_features,) float32."""
        return self.total.sqrt()


@dataclass(frozen=True)
class Factor:
    """A factorised Hessian.

    Attributes:
        upper: (in, in) float32, upper triangular, U with U^T U = (H + damping)^-1: the Cholesky factor of the inverse.
        dead: (in,) bool, features that were zero on every token.
        damping: fraction of the mean diagonal of the live features that was added to the diagonal.
    """

    upper: Tensor
    dead: Tensor
    damping: float


class Hessian:
    """Running sum of x x^T over all tokens.

    Source: Frantar and Alistarh, ICML 2023, arXiv:2301.00774, section 3.1; scaled as the authors' code does it, by
    2 / num_sequences.

    Args:
        in_features: of the linear.
        device: where the sum is kept.
    """

    def __init__(self, in_features: int, device: torch.device | str) -> None:
        # Only the part on and below the diagonal is valid.
        self.total = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)
        self.num_sequences = 0
        self.num_tokens = 0
        self._factors: dict[tuple[float, float], Factor] = {}

    @torch.no_grad()
    def update(self, inputs: Tensor) -> None:
        """Add a batch of inputs, (sequences, tokens, in_features), any float dtype; multiplied in float32."""
        columns = len(self.total)
        flat = inputs.reshape(-1, columns).float()
        # By symmetry the part below the diagonal is enough. In bands it takes 0.6 to 0.7 of the whole product on a
        # CPU; narrow bands would leave an accelerator idle.
        band = BAND if self.total.device.type == "cpu" else columns
        for start in range(0, columns, band):
            stop = min(start + band, columns)
            self.total[start:stop, :stop].addmm_(flat[:, start:stop].T, flat[:, :stop])
        self.num_sequences += len(inputs)
        self.num_tokens += len(flat)
        self._factors.clear()

    @property
    def matrix(self) -> Tensor:
        """2 / num_sequences times the sum of x x^T, (in, in) float32, symmetric, without damping."""
        return self.gram * (2 / self.num_sequences)

    @property
    def gram(self) -> Tensor:
        """Sum of x x^T itself, (in, in) float32, symmetric."""
        return self.total.tril() + self.total.tril(-1).T

    def factor(self, damping: float, max_damping: float) -> Factor:
        """Factorise the damped inverse, raising the damping tenfold until it succeeds; computed once for all who ask.

        Differences from the authors' code: the upper factor of the inverse comes from one Cholesky decomposition and
        one triangular inverse instead of two decompositions and an inverse; the mean that scales the damping is over
        live features, and dead ones get it as their diagonal, so that the scale of the inputs does not matter (the
        authors put 1 there, and it counts in the mean); and where the first damping is not enough the authors stop.

        Args:
            damping: fraction of the mean diagonal to add at first, positive.
            max_damping: the most that may be added.

        Raises:
            NumericalError: the Hessian is empty or not finite, or not positive definite even with max_damping.
        """
        key = (damping, max_damping)
        if key not in self._factors:
            self._factors[key] = self._factorise(damping, max_damping)
        return self._factors[key]

    def _factorise(self, damping: float, max_damping: float) -> Factor:
        columns = len(self.total)
        if not self.num_sequences:
            raise NumericalError(f"the Hessian of {columns} columns has seen no calibration token. Raise calib.count.")
        # Every entry is bounded by two of the diagonal, so the diagonal tells whether all are finite.
        diagonal = self.total.diagonal()
        if bad := int((~diagonal.isfinite()).sum()):
            raise NumericalError(
                f"Hessian not finite: {bad} of {columns} input features are NaN, infinite or too large to square in "
                f"float32 ({self.num_tokens} tokens). Use model.dtype=float32 or bfloat16."
            )
        scale = 2 / self.num_sequences
        dead = diagonal == 0
        live = diagonal[~dead] * scale
        mean = live.mean() if len(live) else torch.ones_like(self.total[0, 0])
        undamped = torch.where(dead, mean, diagonal * scale).flip(0)
        added = damping
        while True:
            # With J reversing the order, J (H + added) J = L L^T gives (H + added)^-1 = U^T U for U = J L^-1 J.
            # Transposed and reversed, the valid part of the sum lies below the diagonal, which is all that is read.
            damped = self.total.T.flip(0, 1).mul_(scale)
            damped.diagonal().copy_(undamped + added * mean)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if not failed.item():
                break
            if added >= max_damping:
                raise NumericalError(
                    f"Hessian not positive definite ({self.num_tokens} tokens, {columns} columns, tried "
                    f"damping={damping:g} to {added:g}). Raise calib.count or pruner.max_damping."
                )
            added = min(10 * added, max_damping)
        del damped
        identity = torch.eye(columns, dtype=torch.float32, device=lower.device)
        upper = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1).contiguous()
        return Factor(upper, dead, added)


class CrossMoment:
    """Running sum of x_dense x^T over all tokens, where x_dense is the same input in the dense model.

    Args:
        in_features: of the linear.
        device: where the sum is kept.
    """

    def __init__(self, in_features: int, device: torch.device | str) -> None:
        self.total = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, inputs: Tensor, dense: Tensor) -> None:
        """Add a batch of inputs and of the dense model's, each (sequences, tokens, in_features), any float dtype."""
        columns = len(self.total)
        self.total.addmm_(dense.reshape(-1, columns).float().T, inputs.reshape(-1, columns).float())
