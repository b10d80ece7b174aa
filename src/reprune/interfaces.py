"""The seams of the framework: what a corpus, an allocation, a pruner and a statistic must offer, as Protocols.

Nothing inherits from these. A class that has the members fits; mypy checks that it does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from reprune.sparsity.pattern import Pattern


class Split(Enum):
    """The part of a corpus that a document belongs to."""

    calib = "calib"
    heldout = "heldout"
    test = "test"


@dataclass(frozen=True)
class Document:
    """One text, and where it belongs.

    Attributes:
        id: unique in its corpus, the same on every machine.
        text: not empty after stripping.
        split: where the source says that it belongs; None if the id is to decide.
    """

    id: str
    text: str
    split: Split | None = None


class Corpus(Protocol):
    """A named source of documents."""

    pack: bool

    def documents(self) -> Iterable[Document]:
        """Yield every document, in an order that does not depend on the machine."""

    def revision(self) -> str:
        """Say which version of the text this is: a pinned package, a hub revision, or a hash of the files."""


@dataclass(frozen=True)
class Writer:
    """The dense model as an author of text.

    Attributes:
        model: causal language model in evaluation mode, on the CPU.
        tokenizer: its tokenizer.
        bos: whether sequences start with BOS.
        device: where it computes.
        seed: of the run.
    """

    model: Any
    tokenizer: Any
    bos: bool
    device: Any
    seed: int


@runtime_checkable
class Generated(Protocol):
    """Settings for text that the dense model writes; what it wrote is a corpus."""

    base: str

    def write(self, writer: Writer, base: Corpus, split: Any, count: int, seq_len: int, draw: int) -> Any:
        """Return a corpus with documents of one split, enough for `count` sequences of `seq_len` tokens."""


class Allocation(Protocol):
    """How much of each block is removed."""

    def allocate(self, num_blocks: int) -> list[float]:
        """Return the sparsity of every block, each in [0, 1)."""

    def resolved_pattern(self) -> Pattern:
        """Return the pattern that survivors form."""


class Statistic(Protocol):
    """What a pruner wants to know of the inputs of one linear (or of several that read the same input)."""

    def __init__(self, in_features: int, device: Any) -> None: ...

    def update(self, inputs: Tensor) -> None:
        """Add a batch of inputs, (sequences, tokens, in_features), any float dtype."""


@dataclass(frozen=True)
class Pruned:
    """What a pruner returns for one linear.

    Attributes:
        weight: (out, in), in the dtype of the weight that came in, exactly zero where keep is False.
        keep: (out, in) bool, True where a weight survives.
        damping: fraction of the mean Hessian diagonal that was added to it, None for methods without a Hessian.
    """

    weight: Tensor
    keep: Tensor
    damping: float | None = None


class Pruner(Protocol):
    """Chooses the survivors of one linear and, for some methods, their values."""

    statistic: ClassVar[type[Any] | None]

    def prune(self, weight: Tensor, stat: Any, sparsity: float, pattern: Pattern) -> Pruned:
        """Prune one (out, in) weight; stat is what `statistic` gathered, None if that is None."""
