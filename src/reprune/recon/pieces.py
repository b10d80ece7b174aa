"""The parts of a block that learn one after the other: its linears, or attention and then feed-forward.

Where attention ends is found by watching one forward pass, so that no family is known by name: it is where the
residual stream enters the first module after it. Families that add it elsewhere, or run both side by side, are refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from reprune.blocks import linears
from reprune.errors import ModelError
from reprune.recon.reconstruction import Unit


@dataclass(frozen=True)
class Cut:
    """A place in a block's forward pass: what enters or leaves one of its modules."""

    module: str
    leaving: bool


@dataclass(frozen=True)
class Piece:
    """A part of a block that learns by itself.

    Attributes:
        name: as records and errors show it.
        modules: names of the block's modules whose parameters belong to it.
        cut: where its output is; None: the block's own output.
    """

    name: str
    modules: list[str]
    cut: Cut | None


class _Reached(Exception):
    """Ends a forward pass at a cut and carries what was found there."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


@contextmanager
def until(block: nn.Module, cut: Cut | None) -> Iterator[Callable[[Callable[[], Tensor]], Tensor]]:
    """Yield a function that runs a forward pass of a block up to a cut and returns what is there."""
    if cut is None:
        yield lambda forward: forward()
        return
    module = block.get_submodule(cut.module)

    def leaving(_: nn.Module, __: Any, output: Any) -> None:
        raise _Reached(output)

    def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(_first(args, kwargs))

    def run(forward: Callable[[], Tensor]) -> Tensor:
        try:
            forward()
        except _Reached as reached:
            return reached.value
        raise ModelError(f"{cut.module} was not called.")

    handle = (
        module.register_forward_hook(leaving)
        if cut.leaving
        else module.register_forward_pre_hook(entering, with_kwargs=True)
    )
    try:
        yield run
    finally:
        handle.remove()


def pieces(unit: Unit, block: nn.Module, forward: Callable[[], Any]) -> list[Piece]:
    """List the parts of a block in the order in which they learn.

    Args:
        unit: linear or submodule.
        block: one decoder block.
        forward: runs it once, on any input.

    Raises:
        ModelError: attention and feed-forward of this family cannot be told apart from outside.
    """
    if unit is Unit.linear:
        called: list[str] = []
        handles = [
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
            for name, module in linears(block).items()
        ]
        _run(forward, handles)
        return [Piece(name, [name], Cut(name, leaving=True)) for name in called]
    return _submodules(block, forward)


def _submodules(block: nn.Module, forward: Callable[[], Any]) -> list[Piece]:
    calls: list[tuple[str, Any, Any]] = []  # child, what it read first, what it gave; kept, so that identities hold

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.append((name, _first(args, kwargs), output[0] if isinstance(output, tuple) else output))

        return hook

    entered: list[Tensor] = []
    handles = [child.register_forward_hook(note(name), with_kwargs=True) for name, child in block.named_children()]
    handles.append(
        block.register_forward_pre_hook(lambda _, args, kwargs: entered.append(_first(args, kwargs)), with_kwargs=True)
    )
    _run(forward, handles)
    with_linears = {name.partition(".")[0] for name in linears(block)}
    heavy = [name for name, _, _ in calls if name in with_linears]
    if len(heavy) < 2:
        raise _refusal(block, f"its linears lie in {', '.join(heavy) or 'no module that is called'}")
    first = next(place for place, (name, _, _) in enumerate(calls) if name == heavy[0])
    before = [*entered, *(value for _, *values in calls[:first] for value in values)]
    own = [calls[first][2]]  # attention's output, without the residual, and what is made of it alone
    for place, (name, read, given) in enumerate(calls[first + 1 :], first + 1):
        if any(read is value for value in own):
            own.append(given)
        elif any(read is value for value in before):
            raise _refusal(block, f"{name} does not wait for {heavy[0]}")
        else:
            early = list(dict.fromkeys(name for name, _, _ in calls[:place]))
            late = [name for name, _ in block.named_children() if name not in early]
            return [Piece(heavy[0], early, Cut(name, leaving=False)), Piece("+".join(heavy[1:]), late, None)]
        if name == heavy[1]:
            break
    raise _refusal(block, f"{heavy[0]} adds the residual itself")


def _run(forward: Callable[[], Any], handles: list[Any]) -> None:
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()


def _refusal(block: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"recon.unit=submodule: attention and feed-forward of {type(block).__name__} do not follow each other on the "
        f"residual stream ({reason}). Use recon.unit=block or recon.unit=linear."
    )


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)
