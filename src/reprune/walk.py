"""The walk: prune, reconstruct and measure every block in order, one window of blocks at a time.

Source: Shin et al., EMNLP 2024, arXiv:2406.15524, section 2; the error is that of its appendix A. Differences from the
authors' code: a block is pruned once, when it first enters a window, and its mask never changes; held-out corpora are
measured beside the calibration sequences; the pass that measures is the pass that advances.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from reprune.blocks import as_stored, decoder_blocks, linears, weight_of
from reprune.devices import peak_memory_bytes
from reprune.errors import NumericalError
from reprune.interfaces import Allocation, Pruner
from reprune.recon.adam import Fit, fit, unit_loss
from reprune.recon.reconstruction import Inputs, KeepBest, Reconstruction, Target, Window
from reprune.sparsity.pattern import Pattern
from reprune.streams import Stream, check_finite, forward_block

CALIB = "calib"  # the name of the calibration stream among the corpora


@dataclass(frozen=True)
class Error:
    """How far a pruned stream is from the dense one after a block.

    Attributes:
        mse: mean squared difference per element (the paper's error, appendix A).
        relative: squared difference over the squared norm of the dense states.
    """

    mse: float
    relative: float


@dataclass(frozen=True)
class LinearRecord:
    """What pruning did to one linear: its size, the fraction of zeros asked and achieved, and the damping if any.

    `short_group` is the size of a last group that an N:M pattern does not fill, 0 if there is none; such a group, too,
    keeps at most N weights.
    """

    size: int
    asked: float
    achieved: float
    damping: float | None
    short_group: int


@dataclass
class BlockRecord:
    """One line of blocks.jsonl.

    Attributes:
        block: its index, from 0.
        window: the blocks of the window that it left.
        before, after: corpus -> Error, after pruning and after reconstruction.
        rounding: corpus -> relative error added by storing the weights in the checkpoint's dtype, empty if float32.
        fits: one entry for each window that trained the block.
        linears: name -> LinearRecord.
        seconds: stage -> seconds; the stages of a window are shared out evenly over its blocks.
        peak_memory_bytes: the most memory in use so far.
        forwards: block forward passes so far, in sequences, outside of training.
    """

    block: int
    window: list[int]
    before: dict[str, Error]
    after: dict[str, Error]
    rounding: dict[str, float]
    fits: list[Fit]
    linears: dict[str, LinearRecord]
    seconds: dict[str, float]
    peak_memory_bytes: int
    forwards: int

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        return asdict(self)


@dataclass
class _Open:
    """A block that some window still holds, on the computing device and in float32."""

    module: nn.Module
    dtypes: dict[str, torch.dtype]
    dense: nn.Module | None = None  # snapshot, where a later window needs the dense block as a teacher
    keep: dict[Tensor, Tensor] = field(default_factory=dict)
    linears: dict[str, LinearRecord] = field(default_factory=dict)
    before: dict[str, Error] = field(default_factory=dict)
    fits: list[Fit] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Walk:
    """One pass over a model; iterate over it to make it happen, block by block.

    Args:
        model: changed in place; on the CPU.
        pruner: chooses the masks.
        recon: updates the survivors.
        allocation: how much of each block is removed, in which pattern.
        corpora: name -> (count, seq_len) int64; `calib` is what masks and weights are fitted to.
        batch_size: sequences a forward pass.
        device: where blocks compute; only the blocks of the window are there.
        stream_device: where hidden states are kept.
        seed: decides the order of the sequences in training.
        mask_rows: the calibration sequences that the pruner's statistics see.
        recon_rows: those that reconstruction learns from; errors are measured on all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pruner: Pruner,
        recon: Reconstruction,
        allocation: Allocation,
        corpora: dict[str, Tensor],
        batch_size: int,
        device: torch.device,
        stream_device: torch.device,
        seed: int,
        mask_rows: slice = slice(None),
        recon_rows: slice = slice(None),
    ) -> None:
        self.blocks = decoder_blocks(model)
        self.pruner = pruner
        self.recon = recon
        self.pattern: Pattern = allocation.resolved_pattern()
        self.sparsities = allocation.allocate(len(self.blocks))
        self.device = device
        self.seed = seed
        count = len(corpora[CALIB])
        self.mask_rows, self.recon_rows = (slice(*rows.indices(count)[:2]) for rows in (mask_rows, recon_rows))
        self.all_choose = self.mask_rows == slice(0, count)  # whether every calibration sequence feeds the statistics
        parts = [self.recon_rows.stop - self.recon_rows.start, self.mask_rows.stop - self.mask_rows.start]
        parts += [recon.batch_size] * recon.trains
        self.streams = {
            name: Stream.enter(
                model, name, tokens, batch_size, device, stream_device, parts=parts if name == CALIB else []
            )
            for name, tokens in corpora.items()
        }  # fmt: skip
        self.calib = self.streams[CALIB]
        self.open: dict[int, _Open] = {}

    def __iter__(self) -> Iterator[BlockRecord]:
        """Prune, reconstruct and measure every block, yielding a record for each as it is left behind."""
        for window in self.recon.windows(len(self.blocks)):
            local = None
            for index in window.entering:
                local = self._enter(index, window)
            if self.recon.trains:
                self._fit(window, self._target(window, local))
            for index in window.leaving:
                yield self._leave(index, window)

    # -- a block enters ------------------------------------------------------------------------------------------

    def _enter(self, index: int, window: Window) -> Tensor | None:
        """Advance the dense streams past a block, prune it, and measure what that did.

        Returns the dense block's output on the pruned calibration stream if a window of this one block learns from it.
        """
        held = self.open[index] = self._open(index)
        with self._timed([index], "propagation"):
            for stream in self.streams.values():
                self._front(stream, range(window.blocks.start, index))
        # Dense passes and statistics come first: pruning overwrites the only copy of the dense weights. Where one pass
        # can serve for several of statistics, local target and (before the first pruned block) dense states, it does.
        teaches = self.recon.trains and self.recon.target is Target.local and len(window.blocks) == 1
        entering = self.calib.front
        assert entering is not None  # set above
        alike = entering is self.calib.dense[index]
        with self._timed([index], "statistics"):
            stats, groups, output = self._gather(held.module, index, want_output=teaches or alike)
        with self._timed([index], "dense"):
            for stream in self.streams.values():
                stream.dense[index + 1] = (
                    output
                    if output is not None and alike and stream is self.calib
                    else stream.run(held.module, index, stream.dense[index], "dense model")
                )
        local = None
        if teaches:
            output = self.calib.dense[index + 1] if alike else output
            local = (
                output[self.recon_rows]
                if output is not None
                else self.calib.run(held.module, index, entering[self.recon_rows], "local target")
            )
        if self.recon.trains and self.recon.target is Target.local and self.recon.window > 1:
            held.dense = copy.deepcopy(held.module)
        with self._timed([index], "pruning"):
            self._prune(held, index, stats, groups)
        with self._timed([index], "propagation"):
            for name, stream in self.streams.items():
                assert stream.front is not None  # set above
                stream.front = stream.run(held.module, index, stream.front, "after pruning")
                held.before[name] = measure(stream.front, stream.dense[index + 1])
        return local

    def _gather(
        self, block: nn.Module, index: int, want_output: bool
    ) -> tuple[dict[str, Any], list[list[str]], Tensor | None]:
        """Collect the pruner's statistics on the pruned calibration stream, one for each distinct input.

        The block's output comes with them if it is wanted and the pass sees every sequence.
        """
        assert self.calib.front is not None
        kind = self.pruner.statistic
        if kind is None:
            return {}, [], None
        found = linears(block)
        stats: dict[str, Any] = {}

        def update(name: str, inputs: Tensor) -> None:
            if name not in stats:
                stats[name] = kind(weight_of(found[name]).shape[1], self.device)
            stats[name].update(inputs if inputs.ndim == 3 else inputs.unsqueeze(0))

        hidden = self.calib.front[self.mask_rows]
        groups, output = self.calib.gather(block, index, hidden, update, found, want_output and self.all_choose)
        return stats, groups, output

    @torch.no_grad()
    def _prune(self, held: _Open, index: int, stats: dict[str, Any], groups: list[list[str]]) -> None:
        """Prune every linear of a block and remember what survives."""
        leader = {name: group[0] for group in groups for name in group}
        for name, linear in linears(held.module).items():
            stat = stats.get(leader.get(name, name))
            if self.pruner.statistic is not None and stat is None:
                raise NumericalError(f"block {index} {name}: no calibration token reached it, so it cannot be pruned.")
            weight = weight_of(linear)
            try:
                pruned = self.pruner.prune(weight, stat, self.sparsities[index], self.pattern)
            except NumericalError as error:
                raise NumericalError(f"block {index} {name}: {error}") from error
            check_finite(pruned.weight, f"pruned weight of block {index} {name}")
            weight.copy_(pruned.weight)
            held.keep[linear.weight] = as_stored(linear, pruned.keep)
            held.linears[name] = LinearRecord(
                weight.numel(),
                self.pattern.sparsity if self.pattern.sparsity is not None else self.sparsities[index],
                1 - pruned.keep.float().mean().item(),
                pruned.damping,
                self.pattern.short_group(weight.shape[1]),
            )

    # -- a window learns -----------------------------------------------------------------------------------------

    def _target(self, window: Window, local: Tensor | None) -> Tensor:
        """Return what should leave the window on the calibration sequences."""
        if self.recon.target is Target.dense:
            return self.calib.dense[window.blocks.stop][self.recon_rows]
        if local is not None:
            return local
        # The window's dense snapshots teach, so that a block already pruned is never its own teacher.
        hidden = self.calib.pruned[self.recon_rows]
        for index in window.blocks:
            teacher = self.open[index].dense
            assert teacher is not None
            hidden = self.calib.run(teacher, index, hidden, "local target")
        return hidden

    def _fit(self, window: Window, target: Tensor) -> None:
        """Train the blocks of a window towards a target."""
        recon, calib = self.recon, self.calib
        modules = [self.open[index].module for index in window.blocks]
        keep = {param: mask for index in window.blocks for param, mask in self.open[index].keep.items()}
        entering = calib.dense[window.blocks.start] if recon.inputs is Inputs.dense else calib.pruned
        inputs = entering[self.recon_rows]

        def predict(batch: Tensor) -> Tensor:
            for index, module in zip(window.blocks, modules, strict=True):
                batch = forward_block(module, batch, calib.call(index, len(batch)))
            return batch

        def error() -> float:
            if recon.keep_best is KeepBest.heldout:
                held_out = [stream for name, stream in self.streams.items() if name != CALIB]
                after = window.blocks.stop
                errors = [measure(self._front(s, window.blocks), s.dense[after]).relative for s in held_out]
                return sum(errors) / len(errors)
            if recon.inputs is Inputs.dense:
                output = self._through(calib, window.blocks, inputs)
            else:
                output = self._front(calib, window.blocks)[self.recon_rows]
            # A sequence at a time: the whole stream at once would double its memory.
            losses = [unit_loss(recon.loss, *pair).item() for pair in zip(output, target, strict=True)]
            return sum(losses) / len(losses)

        def error_of_new_weights() -> float:
            self._forget_fronts()
            return error()

        with self._timed(window.blocks, "reconstruction"):
            # Where the pass that measured the pruned window has gone, this costs nothing.
            start = error() if recon.keep_best is not KeepBest.none else None
            seed = hash((self.seed, window.blocks.start, window.blocks.stop)) % 2**63
            generator = torch.Generator().manual_seed(seed)
            name = f"block {window.blocks.start}" if len(modules) == 1 else f"blocks {[*window.blocks]}"
            result = fit(
                recon, modules, keep, predict, inputs, target, error_of_new_weights, start, generator,
                calib.batch_size, name,
            )  # fmt: skip
        if result.best_step != result.steps:
            self._forget_fronts()  # made by other weights than the ones that were kept
        for index in window.blocks:
            self.open[index].fits.append(result)

    def _through(self, stream: Stream, indices: range, hidden: Tensor) -> Tensor:
        """Run hidden states through blocks that the window holds, under their present weights."""
        for index in indices:
            hidden = stream.run(self.open[index].module, index, hidden, "pruned model")
        return hidden

    def _front(self, stream: Stream, indices: range) -> Tensor:
        """Return the pruned states after `indices`, which reach from the window's start to its newest block.

        They are computed only if no pass under the present weights has done so.
        """
        if stream.front is None:
            stream.front = self._through(stream, indices, stream.pruned)
        return stream.front

    def _forget_fronts(self) -> None:
        for stream in self.streams.values():
            stream.front = None

    # -- a block leaves ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _leave(self, index: int, window: Window) -> BlockRecord:
        """Store a block's weights, measure it, and advance the pruned streams past it."""
        held = self.open.pop(index)
        unrounded: dict[str, Error] = {}
        with self._timed_on(held, "propagation"):
            rounds = any(dtype != torch.float32 for dtype in held.dtypes.values())
            if rounds:
                # What storing costs is measured before it happens, on the weights as they were learned.
                learned = {name: self._past(stream, index, held, window) for name, stream in self.streams.items()}
                unrounded = {name: measure(learned[name], s.dense[index + 1]) for name, s in self.streams.items()}
                for name, param in held.module.named_parameters():
                    param.data = param.data.to(held.dtypes[name]).float()
                self._forget_fronts()
            after = {}
            for name, stream in self.streams.items():
                output = self._past(stream, index, held, window)
                after[name] = measure(output, stream.dense[index + 1])
                stream.pruned = output
                stream.drop_before(index + 1)
            self._close(held)
        return BlockRecord(
            block=index,
            window=[*window.blocks],
            before=held.before,
            after=after,
            rounding={name: after[name].relative - error.relative for name, error in unrounded.items()},
            fits=held.fits,
            linears=held.linears,
            seconds={stage: round(seconds, 4) for stage, seconds in held.seconds.items()},
            peak_memory_bytes=peak_memory_bytes(self.device),
            forwards=sum(stream.forwards for stream in self.streams.values()),
        )

    def _past(self, stream: Stream, index: int, held: _Open, window: Window) -> Tensor:
        """Return the pruned states after a leaving block; after the window's last they may be known already."""
        if index == window.blocks.stop - 1 and stream.front is not None:
            return stream.front
        return stream.run(held.module, index, stream.pruned, "pruned model")

    def _open(self, index: int) -> _Open:
        """Take a block to the computing device in float32, as it will be computed until it is left."""
        block = self.blocks[index]
        dtypes = {name: param.dtype for name, param in block.named_parameters()}
        block.to(self.device).float().requires_grad_(False)
        for name, param in block.named_parameters():
            check_finite(param, f"dense weight {name} of block {index}")
        return _Open(block, dtypes)

    def _close(self, held: _Open) -> None:
        for name, param in held.module.named_parameters():
            mask = held.keep.get(param)
            assert mask is None or not param.data[~mask].any(), f"{name}: a pruned weight is not zero"
            param.data = param.data.to(held.dtypes[name])
        held.module.to("cpu")

    # -- time ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, indices: range | list[int], stage: str) -> Iterator[None]:
        """Book the seconds of a stage on blocks, in equal parts."""
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for index in indices:
            if index in self.open:
                self.open[index].seconds[stage] += (time.perf_counter() - begin) / len(indices)

    @contextmanager
    def _timed_on(self, held: _Open, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        held.seconds[stage] += time.perf_counter() - begin


def sparsity(records: list[BlockRecord]) -> float:
    """Return the fraction of zeros among all weights of the linears of these blocks."""
    pruned = [linear for record in records for linear in record.linears.values()]
    return sum(linear.size * linear.achieved for linear in pruned) / sum(linear.size for linear in pruned)


def measure(pruned: Tensor, dense: Tensor) -> Error:
    """Compare hidden states (count, seq_len, hidden) with the dense model's; sums in float64, a sequence at a time.

    Source: Shin et al., appendix A (`mse`).
    """
    squared = norm = 0.0
    for one, other in zip(pruned, dense, strict=True):
        squared += (one - other).square().sum(dtype=torch.float64).item()
        norm += other.square().sum(dtype=torch.float64).item()
    return Error(mse=squared / pruned.numel(), relative=squared / norm if norm else 0.0)
