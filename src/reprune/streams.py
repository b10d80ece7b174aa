"""Streams: the hidden states of one corpus on their way through the blocks, in the dense and in the pruned model.

The inputs of block 0 and the keyword arguments of every block are captured by running the model with its blocks
stubbed out, and the arguments are replayed as they were: no argument is known by name, so no family needs a case.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from reprune.blocks import decoder_blocks
from reprune.errors import ModelError, NumericalError


@dataclass(frozen=True)
class Call:
    """What the model passes to one block beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _StopForward(Exception):
    """Ends a forward pass once everything wanted of it has been seen."""


def forward_block(block: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """Run one block on hidden states (batch, seq_len, hidden) and return its hidden states, same shape."""
    output = block(hidden, *call.args, **call.kwargs)
    return output[0] if isinstance(output, tuple) else output


class Stream:
    """The hidden states of one corpus entering the blocks of the current window.

    Attributes:
        name: of the corpus, as errors are reported under.
        dense: block index -> (count, seq_len, hidden), the dense model's states entering that block, from the first
            block of the window to the one after its last.
        pruned: (count, seq_len, hidden), the states entering the window's first block in the model pruned so far.
        front: the same after the window's last block under its present weights; None when no pass has produced it.
        forwards: block forward passes run so far, counted in sequences.
    """

    def __init__(
        self, name: str, hidden: Tensor, calls: dict[int, list[Call]], device: torch.device, batch_size: int
    ) -> None:
        self.name = name
        self.dense: dict[int, Tensor] = {0: hidden}
        self.pruned = hidden  # the two streams part after block 0; nothing writes into a stream in place
        self.front: Tensor | None = hidden
        self.forwards = 0
        self.device = device
        self.batch_size = batch_size
        self._calls = calls

    @classmethod
    def enter(
        cls,
        model: PreTrainedModel,
        name: str,
        tokens: Tensor,
        batch_size: int,
        device: torch.device,
        stream_device: torch.device,
        parts: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
    ) -> "Stream":
        """Start a stream: tokens (count, seq_len) int64 become the hidden states entering block 0.

        Args:
            model: left as it was; its embeddings are computed in float32 whatever their dtype.
            name: of the corpus.
            tokens: (count, seq_len) int64.
            batch_size: sequences a forward pass.
            device: where blocks compute.
            stream_device: where hidden states are kept.
            parts: how many sequences at a time will go through blocks beside all of them, in batches of batch_size.
            dtype: hidden states are kept in; they are computed in float32.

        Raises:
            ModelError: blocks get arguments that depend on the tokens, so that they cannot be replayed.
        """
        calls: dict[int, list[Call]] = {}
        chunks = []
        with _float32_outside_blocks(model), _Stubs(model) as stubs:
            for batch in tokens.split(batch_size):
                hidden, seen = stubs.run(batch)
                chunks.append(hidden.to(stream_device, dtype))
                known = calls.setdefault(len(batch), seen)
                if not _same(known, seen):
                    raise ModelError(
                        f"{type(model).__name__} is unsupported because its blocks get arguments that depend on the "
                        f"tokens, so they cannot be captured once and replayed."
                    )
            for size in {size for part in parts for size in (min(part, batch_size), part % batch_size)}:
                if size and size not in calls:
                    calls[size] = stubs.run(tokens[:1].expand(size, -1))[1]
        moved = {size: [_to(call, device) for call in per_block] for size, per_block in calls.items()}
        return cls(name, torch.cat(chunks), moved, device, batch_size)

    def call(self, index: int, batch_size: int) -> Call:
        """Return what the model passes to block `index` for a batch of that many sequences."""
        return self._calls[batch_size][index]

    def batches(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and the hidden states, on the computing device and in float32, of each batch."""
        for start in range(0, len(hidden), self.batch_size):
            rows = slice(start, min(start + self.batch_size, len(hidden)))
            yield rows, hidden[rows].to(self.device).float()

    @torch.no_grad()
    def run(
        self, block: nn.Module, index: int, hidden: Tensor, stage: str,
        forward: Callable[[nn.Module, Tensor, Call], Tensor] = forward_block,
    ) -> Tensor:  # fmt: skip
        """Run every sequence of `hidden` through one block and return what leaves it, (count, seq_len, features).

        Args:
            block: the block.
            index: its place in the model.
            hidden: (count, seq_len, hidden) states entering it.
            stage: of the walk, for errors.
            forward: runs the block on a batch; another one may stop inside it.

        Raises:
            NumericalError: the result is not finite; names corpus, block and stage.
        """
        output = None
        for rows, batch in self.batches(hidden):
            result = forward(block, batch, self.call(index, len(batch)))
            if output is None:
                output = hidden.new_empty(*hidden.shape[:2], result.shape[-1])
            output[rows] = result
        assert output is not None  # a stream has sequences
        self.forwards += len(hidden)
        check_finite(output, f"hidden states of {self.name} after block {index} ({stage})")
        return output

    @torch.no_grad()
    def gather(
        self, block: nn.Module, index: int, hidden: Tensor, update: Callable[[str, Tensor, Tensor | None], None],
        linears: Mapping[str, nn.Module], want_output: bool, dense: Tensor | None = None,
    ) -> tuple[list[list[str]], Tensor | None, Tensor | None]:  # fmt: skip
        """Run a block once and hand the inputs of its linears to `update`, once for all that read the same input.

        Args:
            block: the still dense block.
            index: its place in the model.
            hidden: (count, seq_len, hidden) states entering it.
            update: called for every batch with the name of the first linear that reads an input, that input, and the
                same input for the states `dense`, None without them.
            linears: the linears to watch, by name.
            want_output: False ends each pass at the last linear's input, before its product is computed.
            dense: other states entering the block, same shape, to watch beside the first.

        Returns:
            The groups of linears that read the same input (names, first one first), and what leaves the block for
            `hidden`, None if not wanted, and for `dense`, None without them.
        """
        beside: dict[str, Tensor] = {}
        watch = _SharedInputs(linears, lambda name, inputs: update(name, inputs, beside.get(name)))
        other = _SharedInputs(linears, beside.__setitem__)
        output = torch.empty_like(hidden) if want_output else None
        dense_output = None if dense is None else torch.empty_like(dense)
        for rows, batch in self.batches(hidden):
            if dense is not None and dense_output is not None:
                with other:
                    other.next_batch(stop_at_last=False)
                    dense_output[rows] = forward_block(block, dense[rows].to(batch), self.call(index, len(batch)))
            with watch:
                watch.next_batch(stop_at_last=not want_output)
                try:
                    result = forward_block(block, batch, self.call(index, len(batch)))
                except _StopForward:
                    continue
                if output is not None:
                    output[rows] = result
        self.forwards += len(hidden) * (1 if dense is None else 2)
        if dense_output is not None:
            check_finite(dense_output, f"hidden states of {self.name} after block {index} (dense model)")
        return watch.groups, output, dense_output

    def drop_before(self, index: int) -> None:
        """Forget dense states that no later window needs."""
        for key in [key for key in self.dense if key < index]:
            del self.dense[key]


def check_finite(values: Tensor, what: str) -> None:
    """Raise NumericalError if values holds a NaN or an infinity."""
    if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
        sequence = int((~torch.isfinite(values)).flatten(1).any(1).nonzero()[0]) if values.ndim > 1 else 0
        raise NumericalError(
            f"{what}: not finite (first in sequence {sequence}). If the checkpoint is float16, try "
            f"model.dtype=bfloat16 or float32; if this came after reconstruction, lower recon.learning_rate."
        )


class _Stubs:
    """Replaces the forward of every block by one that records its arguments and hands its input on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.blocks = decoder_blocks(model)

    def __enter__(self) -> "_Stubs":
        self.returns_tuple = self._returns_tuple()
        for index, block in enumerate(self.blocks):
            block.forward = self._stub(index)  # shadows the class's forward until deleted
        return self

    def __exit__(self, *_: object) -> None:
        for block in self.blocks:
            del block.forward

    def run(self, tokens: Tensor) -> tuple[Tensor, list[Call]]:
        """Return the hidden states entering block 0 and each block's call, for tokens (batch, seq_len)."""
        self.calls: list[Call] = []
        self._forward(tokens)
        return self.hidden, self.calls

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> None:
        try:
            self.model(input_ids=tokens.to(self.model.device), use_cache=False)
        except _StopForward:
            return
        raise ModelError(f"{type(self.model).__name__} is unsupported because it did not call its last block.")

    def _returns_tuple(self) -> bool:
        """Find out, from block 0 on two tokens, whether blocks return a tensor or a tuple that starts with it."""
        seen = []

        def note(_: nn.Module, __: Any, output: Any) -> None:
            seen.append(isinstance(output, tuple))
            raise _StopForward

        # Block 0 alone in float32, as everything around it is while stubs are on.
        dtypes = {param: param.dtype for param in self.blocks[0].parameters()}
        self.blocks[0].float()
        handle = self.blocks[0].register_forward_hook(note)
        try:
            self._forward(torch.zeros(1, 2, dtype=torch.int64))
        finally:
            handle.remove()
            for param, dtype in dtypes.items():
                param.data = param.data.to(dtype)
        return seen[0]

    def _stub(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if len(self.calls) != index:
                raise ModelError(
                    f"{type(self.model).__name__} is unsupported because it calls its blocks out of order."
                )
            if args:
                hidden, args = args[0], args[1:]
            else:
                hidden = kwargs.pop("hidden_states")
            if index == 0:
                self.hidden = hidden
            self.calls.append(Call(args, kwargs))
            if index == len(self.blocks) - 1:
                raise _StopForward  # what follows the blocks (norm, a head as wide as the vocabulary) is not needed
            return (hidden,) if self.returns_tuple else hidden

        return forward


class _SharedInputs:
    """Forward pre-hooks that see each distinct input of a block's linears once a batch.

    Linears whose input is the same tensor object (q, k, v; gate, up) form a group; the groups are learned on the
    first batch and checked on every other.
    """

    def __init__(self, linears: Mapping[str, nn.Module], update: Callable[[str, Tensor], None]) -> None:
        self.linears = linears
        self.update = update
        self.groups: list[list[str]] = []
        self._seen: list[tuple[str, Tensor]] = []  # (leader, input) of this batch; holding the tensor keeps its id
        self._calls = 0
        self._first = True
        self._once_each = False  # whether the first batch called every linear exactly once
        self._stop = False

    def __enter__(self) -> "_SharedInputs":
        self._handles = [
            module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, module in self.linears.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._seen.clear()

    def next_batch(self, stop_at_last: bool) -> None:
        """Get ready for a batch. Stopping early is sound only once a whole pass has called every linear once."""
        if self._calls:
            self._once_each = self._calls == len(self.linears) == sum(map(len, self.groups))
            self._first = False
        self._seen.clear()
        self._calls = 0
        self._stop = stop_at_last and self._once_each

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            self._calls += 1
            leader = next((first for first, seen in self._seen if seen is value), None)
            if self._first:
                self._learn(name, leader)
            elif not any(name in group and group[0] == (leader or name) for group in self.groups):
                raise ModelError(f"linear {name} does not read the same input in every batch: it cannot be pruned.")
            if leader is None:
                self._seen.append((name, value))
                self.update(name, value)
            if self._stop and self._calls == len(self.linears):
                raise _StopForward

        return hook

    def _learn(self, name: str, leader: str | None) -> None:
        if any(name in group for group in self.groups):
            raise ModelError(f"linear {name} is called more than once in a block: it cannot be pruned.")
        if leader is None:
            self.groups.append([name])
        else:
            next(group for group in self.groups if group[0] == leader).append(name)


@contextmanager
def _float32_outside_blocks(model: PreTrainedModel) -> Iterator[None]:
    """Hold everything but the blocks in float32, so that embeddings, masks and rotary tables come out in float32.

    Blocks are computed in float32; a mask in the checkpoint's bfloat16 would not fit their queries.
    """
    inside = {id(tensor) for block in decoder_blocks(model) for tensor in [*block.parameters(), *block.buffers()]}
    outside = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in inside and t.is_floating_point()]
    dtypes = [tensor.dtype for tensor in outside]
    for tensor in outside:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in zip(outside, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


def _to(value: Any, device: torch.device) -> Any:
    """Move every tensor in a nested argument to a device; anything else is handed on as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Call):
        return Call(_to(value.args, device), _to(value.kwargs, device))
    if isinstance(value, tuple | list):
        return type(value)(_to(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    """Whether two nested arguments hold equal tensors; objects that are no tensors are not compared."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Call):
        return isinstance(other, Call) and _same(one.args, other.args) and _same(one.kwargs, other.kwargs)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return True
