"""The walk: prune, reconstruct and measure every block in order, one window of blocks at a time.

Source: Shin et al., EMNLP 2024, arXiv:2406.15524, section 2; the error is that of its appendix A. Differences from the
authors' code: a block is pruned once, when it first enters a window, and its mask never changes; held-out corpora are
measured beside the calibration sequences; the pass that measures is the pass that advances.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from reprune.blocks import as_stored, decoder_blocks, linears, weight_of
from reprune.devices import peak_memory_bytes
from reprune.errors import NumericalError
from reprune.interfaces import Allocation, Pruner
from reprune.recon.adam import Fit, fit, unit_loss
from reprune.recon.least_squares import least_squares
from reprune.recon.pieces import Piece, pieces, until
from reprune.recon.reconstruction import Inputs, KeepBest, Reconstruction, Target, Unit, Window
from reprune.sparsity.pattern import Pattern
from reprune.statistics import CrossMoment, Hessian
from reprune.streams import Call, Stream, check_finite, forward_block

CALIB = "calib"  # the name of the calibration stream among the corpora


@dataclass(frozen=True)
class Error:
    """How far a pruned stream is from the dense one after a block.

    Attributes:
        mse: mean squared difference per element (the paper's error, appendix A).
        relative: squared difference over the squared norm of the dense states.
        mse_typical: median over tokens of a token's squared difference over the squared norm of its dense state; what
            `relative` would be without the few tokens that carry most of the norm.
        token_share: share of the squared difference that lies on the hundredth of the tokens (at least one) with the
            largest dense norm.
    """

    mse: float
    relative: float
    mse_typical: float
    token_share: float


@dataclass(frozen=True)
class LinearRecord:
    """What pruning did to one linear: its size, the fraction of zeros asked and achieved, and the damping if any.

    `short_group` is the size of a last group that an N:M pattern does not fill, 0 if there is none; such a group, too,
    keeps at most N weights. `solved` is (loss before, loss after, steps, residual) of least squares, None without it.
    """

    size: int
    asked: float
    achieved: float
    damping: float | None
    short_group: int
    solved: tuple[float, float, int, float] | None = None


@dataclass
class BlockRecord:
    """One line of blocks.jsonl.

    Attributes:
        block: its index, from 0.
        window: the blocks of the window that it left.
        before, after: corpus -> Error, after pruning and after the last window that trained the block.
        rounding: corpus -> relative error added by storing the weights in the checkpoint's dtype, empty if float32.
        fits: one entry for each window or piece that trained the block, in order.
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
    dense: nn.Module | None = None  # snapshot, where what comes later needs the dense weights
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
        stream_dtype: that hidden states are kept in; they are computed in float32.
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
        stream_dtype: torch.dtype = torch.float32,
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
        self.every = slice(0, count)
        parts = [self.recon_rows.stop - self.recon_rows.start, self.mask_rows.stop - self.mask_rows.start]
        parts += [recon.batch_size] * recon.trains
        self.streams = {
            name: Stream.enter(
                model, name, tokens, batch_size, device, stream_device, parts if name == CALIB else [], stream_dtype
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
                with self._timed(window.blocks, "reconstruction"):
                    if self.recon.unit is Unit.block:
                        self._fit_window(window, local)
                    else:
                        self._fit_pieces(window)
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
        teaches = (
            self.recon.trains
            and self.recon.unit is Unit.block
            and self.recon.target is Target.local
            and len(window.blocks) == 1
        )
        entering = self.calib.front
        assert entering is not None  # set above
        alike = entering is self.calib.dense[index]
        with self._timed([index], "statistics"):
            gathered = self._gather(held.module, index, want_output=teaches or alike)
        with self._timed([index], "dense"):
            for stream in self.streams.values():
                known = None
                if stream is self.calib:
                    known = gathered.output if alike and gathered.output is not None else gathered.dense_output
                stream.dense[index + 1] = (
                    known if known is not None else stream.run(held.module, index, stream.dense[index], "dense model")
                )
        local = None
        if teaches:
            output = self.calib.dense[index + 1] if alike else gathered.output
            local = (
                output[self.recon_rows]
                if output is not None
                else self.calib.run(held.module, index, entering[self.recon_rows], "local target")
            )
        pieces_teach = self.recon.trains and self.recon.unit is not Unit.block
        windows_teach = self.recon.trains and self.recon.target is Target.local and self.recon.overlaps
        if pieces_teach or windows_teach or self.recon.solves_linears:
            held.dense = copy.deepcopy(held.module)
        with self._timed([index], "pruning"):
            self._prune(held, index, gathered)
        with self._timed([index], "propagation"):
            for name, stream in self.streams.items():
                assert stream.front is not None  # set above
                stream.front = stream.run(held.module, index, stream.front, "after pruning")
                held.before[name] = measure(stream.front, stream.dense[index + 1])
        if self.recon.solves_linears:
            with self._timed([index], "reconstruction"):
                self._solve(held, gathered)
        return local

    def _gather(self, block: nn.Module, index: int, want_output: bool) -> "_Gathered":
        """Collect what pruner and least squares ask of the inputs of the linears, once for each distinct input.

        One pass serves both where they see the same sequences. What leaves the block comes with it if the pass sees
        every sequence: for the pruned stream if that is wanted, for the dense one where least squares watches it.
        """
        found = linears(block)
        solves = self.recon.solves_linears
        paired = solves and self.recon.target is Target.dense
        together = self.mask_rows == self.recon_rows or not solves
        wanted = [(self.mask_rows, {self.pruner.statistic} - {None}, False)]
        if solves and together:
            wanted = [(self.mask_rows, {self.pruner.statistic, Hessian} - {None}, paired)]
        elif solves:
            wanted.append((self.recon_rows, {Hessian}, paired))
        result = _Gathered()
        for rows, kinds, beside in wanted:
            if not kinds:
                continue
            store: dict[tuple[str, type | None], Any] = {}

            def update(name: str, inputs: Tensor, dense: Tensor | None, kinds: Any = kinds, store: Any = store) -> None:
                for kind in [*kinds, CrossMoment] if dense is not None else kinds:
                    if (name, kind) not in store:
                        store[name, kind] = kind(weight_of(found[name]).shape[1], self.device)
                    rows = [
                        value if value.ndim == 3 else value.unsqueeze(0)
                        for value in (inputs, dense)
                        if value is not None
                    ]
                    store[name, kind].update(*(rows if kind is CrossMoment else rows[:1]))

            assert self.calib.front is not None
            dense = self.calib.dense[index][rows] if beside else None
            everything = rows == self.every
            groups, output, dense_output = self.calib.gather(
                block, index, self.calib.front[rows], update, found, want_output and everything, dense
            )
            leader = {name: group[0] for group in groups for name in group}
            if (kind := self.pruner.statistic) in kinds:
                result.choose = {name: store.get((first, kind)) for name, first in leader.items()}
            if solves and Hessian in kinds:
                result.learn = {
                    name: (store[first, Hessian], store.get((first, CrossMoment))) for name, first in leader.items()
                }
            if everything:
                result.output, result.dense_output = output, dense_output
        return result

    @torch.no_grad()
    def _prune(self, held: _Open, index: int, gathered: "_Gathered") -> None:
        """Prune every linear of a block and remember what survives."""
        for name, linear in linears(held.module).items():
            stat = gathered.choose.get(name)
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

    @torch.no_grad()
    def _solve(self, held: _Open, gathered: "_Gathered") -> None:
        """Replace what the pruner left of each linear by the closed-form solution for its mask."""
        assert held.dense is not None
        dense = linears(held.dense)
        for name, linear in linears(held.module).items():
            hessian, cross = gathered.learn[name]
            weight, keep = weight_of(linear), as_stored(linear, held.keep[linear.weight])
            solution = least_squares(
                weight_of(dense[name]), weight, keep, hessian.gram, None if cross is None else cross.total,
                self.recon.damping, self.recon.tolerance, self.recon.max_iterations,
            )  # fmt: skip
            weight.copy_(solution.weight)
            record = held.linears[name]
            solved = (solution.start, solution.loss, solution.iterations, solution.residual)
            held.linears[name] = replace(record, solved=solved)
        self._forget_fronts()

    # -- a window learns -----------------------------------------------------------------------------------------

    def _target(self, window: Window, local: Tensor | None) -> Tensor:
        """Return what should leave the window on the calibration sequences that it learns from."""
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

    def _inputs(self, window: Window) -> Tensor:
        """Return what enters a window while it learns."""
        dense = self.recon.inputs is Inputs.dense
        return (self.calib.dense[window.blocks.start] if dense else self.calib.pruned)[self.recon_rows]

    def _fit_window(self, window: Window, local: Tensor | None) -> None:
        """Train the blocks of a window together."""
        recon, calib = self.recon, self.calib
        inputs, target = self._inputs(window), self._target(window, local)
        loss = self._loss(target)
        held_out = {name: stream for name, stream in self.streams.items() if name != CALIB}
        fresh = True  # whether the fronts may be of the present weights: only before the first step

        def predict(batch: Tensor) -> Tensor:
            for index in window.blocks:
                args = self.open[index].module, batch, calib.call(index, len(batch))
                batch = (
                    checkpoint(forward_block, *args, use_reentrant=False)
                    if recon.checkpointing
                    else forward_block(*args)
                )
            return batch

        def evaluate(criterion: bool, heldout: bool) -> tuple[float | None, dict[str, float]]:
            nonlocal fresh
            if not fresh:
                self._forget_fronts()
            fresh = False
            by_heldout = criterion and recon.keep_best is KeepBest.heldout
            errors = {
                name: measure(self._front(stream, window.blocks), stream.dense[window.blocks.stop]).relative
                for name, stream in held_out.items()
                if heldout or by_heldout
            }
            if by_heldout:
                return sum(errors.values()) / len(errors), errors
            if not criterion:
                return None, errors
            if recon.inputs is Inputs.dense:
                return _mean_loss(loss, self._through(calib, window.blocks, inputs), target), errors
            return _mean_loss(loss, self._front(calib, window.blocks)[self.recon_rows], target), errors

        first, last = window.blocks.start, window.blocks.stop - 1
        self._fit(window, [], predict, inputs, target, loss, evaluate,
                  f"block {first}" if first == last else f"blocks {first} to {last}")  # fmt: skip

    def _fit_pieces(self, window: Window) -> None:
        """Train the parts of a block one after the other, each behind the present state of those before it."""
        (index,) = window.blocks
        held, calib, inputs = self.open[index], self.calib, self._inputs(window)
        assert held.dense is not None

        def once() -> Tensor:
            _, batch = next(calib.batches(inputs))
            with torch.no_grad():
                return forward_block(held.module, batch, calib.call(index, len(batch)))

        for piece in pieces(self.recon.unit, held.module, once):
            with until(held.dense, piece.cut) as dense_run, until(held.module, piece.cut) as run:

                def teach(block: nn.Module, batch: Tensor, call: Call, run: Any = dense_run) -> Tensor:
                    return run(lambda: forward_block(block, batch, call))

                def learn(block: nn.Module, batch: Tensor, call: Call, run: Any = run) -> Tensor:
                    return run(lambda: forward_block(block, batch, call))

                if self.recon.target is Target.dense:
                    states = calib.dense[index][self.recon_rows]
                    target = calib.run(held.dense, index, states, "dense target", teach)
                else:
                    # The dense weights of this piece, behind what the pieces before it have become.
                    with _dense_weights(held, piece):
                        target = calib.run(held.module, index, inputs, "local target", learn)
                loss = self._loss(target)

                def predict(batch: Tensor, learn: Any = learn) -> Tensor:
                    return learn(held.module, batch, calib.call(index, len(batch)))

                def evaluate(
                    criterion: bool, heldout: bool, learn: Any = learn, loss: Any = loss, target: Tensor = target
                ) -> tuple[float | None, dict[str, float]]:
                    output = calib.run(held.module, index, inputs, "pruned model", learn)
                    return _mean_loss(loss, output, target), {}

                self._fit(window, piece.modules, predict, inputs, target, loss, evaluate, piece.name)
        self._forget_fronts()

    def _fit(
        self, window: Window, parts: list[str], predict: Any, inputs: Tensor, target: Tensor, loss: Any,
        evaluate: Any, unit: str,
    ) -> None:  # fmt: skip
        """Train the named modules of a single block, or without names all blocks of a window."""
        held = [self.open[index] for index in window.blocks]
        whole = not parts
        modules = [item.module for item in held] if whole else [held[0].module.get_submodule(name) for name in parts]
        keep = {param: mask for item in held for param, mask in item.keep.items()}
        seed = int.from_bytes(sha256(f"{self.seed}/{window.blocks}/{unit}".encode()).digest()[:7])
        where = unit if whole else f"block {window.blocks.start}, {unit}"
        result = fit(
            self.recon, modules, keep, predict, inputs, target, loss, evaluate,
            torch.Generator().manual_seed(seed), self.calib.batch_size, unit, where,
        )  # fmt: skip
        looked = result.evaluations or result.heldout  # the last look, if any, was at the end
        if not looked or result.best_step not in (None, result.steps):
            self._forget_fronts()  # made by other weights than the ones that were kept
        for item in held:
            item.fits.append(result)

    def _loss(self, target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        scale = sum(row.float().square().sum(dtype=torch.float64).item() for row in target) / target.numel()
        return partial(unit_loss, self.recon.loss, scale or 1.0)

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


@dataclass
class _Gathered:
    """What one or two passes over a dense block on the pruned calibration stream have shown.

    Attributes:
        choose: linear -> the pruner's statistic.
        learn: linear -> Hessian and, for a dense target, cross moment.
        output, dense_output: what leaves the block for the pruned and for the dense calibration stream, if known.
    """

    choose: dict[str, Any] = field(default_factory=dict)
    learn: dict[str, tuple[Hessian, CrossMoment | None]] = field(default_factory=dict)
    output: Tensor | None = None
    dense_output: Tensor | None = None


@contextmanager
def _dense_weights(held: _Open, piece: Piece) -> Iterator[None]:
    """Put the dense weights of a piece into a block for a while."""
    assert held.dense is not None
    pairs = [
        (param, held.dense.get_parameter(f"{name}.{key}"))
        for name in piece.modules
        for key, param in held.module.get_submodule(name).named_parameters()
    ]
    present = [param.data for param, _ in pairs]
    for param, dense in pairs:
        param.data = dense.data
    try:
        yield
    finally:
        for (param, _), data in zip(pairs, present, strict=True):
            param.data = data


def _mean_loss(loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> float:
    """Average a loss over sequences, one at a time: the whole stream at once would double its memory."""
    losses = [loss(one.float(), other.float()).item() for one, other in zip(output, target, strict=True)]
    return sum(losses) / len(losses)


def sparsity(records: list[BlockRecord]) -> float:
    """Return the fraction of zeros among all weights of the linears of these blocks."""
    pruned = [linear for record in records for linear in record.linears.values()]
    return sum(linear.size * linear.achieved for linear in pruned) / sum(linear.size for linear in pruned)


def measure(pruned: Tensor, dense: Tensor) -> Error:
    """Compare hidden states (count, seq_len, hidden) with the dense model's.

    Squares are summed in float32 over the features of a token and in float64 over tokens, a sequence at a time.

    Source: Shin et al., appendix A (`mse`).
    """
    rows = [(one.float(), other.float()) for one, other in zip(pruned, dense, strict=True)]
    squared = torch.cat([(one - other).square().sum(-1) for one, other in rows]).double()
    norm = torch.cat([other.square().sum(-1) for _, other in rows]).double()
    total, tiny = squared.sum(), torch.finfo(torch.float64).tiny
    largest = norm.topk(max(1, len(norm) // 100)).indices
    return Error(
        mse=(total / pruned.numel()).item(),
        relative=(total / norm.sum()).item() if norm.any() else 0.0,
        mse_typical=(squared / norm.clamp_min(tiny)).median().item(),
        token_share=(squared[largest].sum() / total).item() if total > 0 else 0.0,
    )
