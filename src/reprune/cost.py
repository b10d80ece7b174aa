"""What a run will cost, said before any work: forward and backward passes, memory, and a rough time."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from reprune.blocks import decoder_blocks, linears, weight_of
from reprune.config import Plan
from reprune.devices import peak_memory_bytes
from reprune.recon.adam import spread
from reprune.recon.reconstruction import Inputs, KeepBest, Reconstruction, Target, Unit

EFFICIENCY = 0.75  # share of the matrix peak that whole blocks reach, measured on two CPUs
WRITING = 0.15  # the same for text that the model writes token by token, 32 at once
OVERHEAD = 250 * 2**20  # bytes for text, tokenizer, plots, and freed memory that the allocator keeps; measured
SEARCH = 1.5  # SparseGPT-like work on statistics, as a multiple of their matrix products


@dataclass(frozen=True)
class Cost:
    """An estimate for one run.

    Attributes:
        forwards: block forward passes outside of training, in sequences.
        trained: block forward and backward passes in training, in sequences.
        peak_bytes: the most memory that will be in use: of the process, or on a CUDA device of what is allocated there.
        seconds: of walk and evaluation, on the computing device.
    """

    forwards: int
    trained: int
    peak_bytes: int
    seconds: float


def count_forwards(
    recon: Reconstruction,
    statistics: bool,
    rounds: bool,
    num_blocks: int,
    calib: int,
    heldout: int,
    choose: int | None = None,
    learn: int | None = None,
    units: int = 1,
) -> int:
    """Count the block forward passes of a walk outside of training, in sequences, by going through its events.

    Exact if every window keeps its last iterate; each one that is restored costs the window's passes once more.

    Args:
        recon: the reconstruction.
        statistics: whether the pruner gathers any.
        rounds: whether the checkpoint's dtype is narrower than float32.
        num_blocks: of the model.
        calib: calibration sequences.
        heldout: sequences of all held-out corpora together.
        choose: the calibration sequences that feed the pruner's statistics; None: all.
        learn: those that reconstruction learns from; None: all.
        units: pieces of a block that learn one after the other, where recon.unit is not a block. A pass that ends
            inside the block counts as one.
    """
    choose, learn = calib if choose is None else choose, calib if learn is None else learn
    total = 0
    calib_front = heldout_front = True  # whether the states in front of the next block are known

    def fronts(blocks: int) -> None:
        nonlocal total, calib_front, heldout_front
        total += blocks * (calib * (not calib_front) + heldout * (not heldout_front))
        calib_front = heldout_front = True

    solves = recon.solves_linears
    paired = solves and recon.target is Target.dense  # least squares watches the dense stream too
    # Every sequence is for masks or for reconstruction, so the two see the same ones only where both see all.
    together = choose == learn == calib or not solves
    # Whether the pass of the statistics sees every sequence, and so yields what others need.
    shared = choose == calib and (statistics or (solves and together))
    for window in recon.windows(num_blocks):
        width = len(window.blocks)
        by_blocks = recon.trains and recon.unit is Unit.block
        local = by_blocks and recon.target is Target.local
        for index in window.entering:
            fronts(index - window.blocks.start)
            teaches = local and width == 1
            if together:
                total += choose * (statistics or solves) * (1 + paired)
            else:
                total += choose * statistics + learn * (1 + paired)
            knows_dense = (shared and index == 0) or (paired and learn == calib)
            total += heldout + calib * (not knows_dense)
            total += learn * (teaches and not shared and index != 0)
            total += calib + heldout  # after pruning
            if solves:
                calib_front = heldout_front = False
        if by_blocks:
            if local and not (width == 1 and window.entering):
                total += learn * width
            steps = recon.num_steps(learn)
            best = spread(steps, recon.evaluations) if recon.keep_best is not KeepBest.none else set()
            watch = spread(steps, recon.heldout_evaluations)
            by_heldout = recon.keep_best is KeepBest.heldout
            seen = (watch | best) if by_heldout else watch
            if seen:
                total += heldout * width * (len(seen) + (not heldout_front))
            if best and not by_heldout and recon.inputs is Inputs.dense:
                total += learn * width * (len(best) + 1)
            elif best and not by_heldout:
                total += calib * width * (len(best) + (not calib_front))
            calib_front = bool(best) and not by_heldout and recon.inputs is Inputs.pruned
            heldout_front = bool(seen)
        elif recon.trains:
            # Each piece: its target, and the criterion before and along the way.
            best = spread(recon.num_steps(learn), recon.evaluations) if recon.keep_best is not KeepBest.none else set()
            total += learn * units * (1 + (len(best) + 1 if best else 0))
            calib_front = heldout_front = False
        for index in window.leaving:
            for _ in range(1 + rounds):
                last = index == window.blocks.stop - 1
                total += calib * (not (last and calib_front)) + heldout * (not (last and heldout_front))
                if rounds:
                    calib_front = heldout_front = False
            if index == window.blocks.stop - 1:
                calib_front = heldout_front = True
    return total


def estimate(plan: Plan, skeleton: Any, device: torch.device) -> Cost:
    """Estimate a run from the model's shapes.

    Args:
        plan: the run.
        skeleton: the model without weights (on the meta device) or with them; only shapes and dtypes are read.
        device: where blocks compute; its speed is measured in some tens of milliseconds.
    """
    blocks = decoder_blocks(skeleton)
    shapes = [tuple(weight_of(module).shape) for module in linears(blocks[0]).values()]
    weights = sum(rows * columns for rows, columns in shapes)
    config = skeleton.config.get_text_config(decoder=True)
    hidden, vocabulary, depth = config.hidden_size, config.vocab_size, len(blocks)
    heldout = plan.heldout_count * len(plan.heldout)
    narrow = next(blocks[0].parameters()).dtype != torch.float32
    statistics = plan.pruner.statistic is not None
    units = {Unit.block: 1, Unit.submodule: 2, Unit.linear: len(shapes)}[plan.recon.unit]
    count, choose, learn = sum(part.count for part in plan.parts), size_of(plan.mask_rows), size_of(plan.recon_rows)
    forwards = count_forwards(plan.recon, statistics, narrow, depth, count, heldout, choose, learn, units=units)
    recon = plan.recon
    spans = [len(window.blocks) for window in recon.windows(depth)]
    trained = recon.num_steps(learn) * recon.batch_size * sum(spans) * units if recon.trains else 0

    per_token = 2 * weights + 2 * plan.seq_len * hidden  # causal attention: half of 2 products of seq_len x hidden
    grams = 2 * sum(columns**2 for columns in {columns for _, columns in shapes}) * choose * plan.seq_len
    flops = (forwards + 3 * trained) * plan.seq_len * per_token + SEARCH * grams * depth * statistics
    for item in plan.evals.values():  # what needs no corpus, such as zeroshot, is left out: nobody knows its items yet
        scored = len(item.corpora) * item.windows * item.seq_len
        flops += scored * (2 * depth * (2 * weights + 2 * item.seq_len * hidden) + 3 * 2 * vocabulary * hidden)

    written = sum(part.count for part in plan.parts if hasattr(plan.corpora[part.corpus], "write")) * plan.seq_len
    flops += written * 2 * (depth * weights + vocabulary * hidden) * EFFICIENCY / WRITING

    bytes_each = 4 if plan.stream_dtype == "float32" else 2
    stream = (count + heldout) * plan.seq_len * hidden * bytes_each
    block_bytes = sum(param.numel() for param in blocks[0].parameters()) * 4
    at_once = plan.batch_size * plan.seq_len * 4  # of one number for every token of a forward pass
    widest = max(rows for rows, _ in shapes)
    # A backward pass needs what every step of the forward pass read; without one the widest products are the most.
    kept = 1 if recon.checkpointing else max(spans)  # blocks whose every step is kept
    activations = at_once * ((20 * hidden + 6 * widest) * kept if recon.trains else 2 * hidden + 4 * widest)
    walk = (
        (5 if recon.trains and recon.target is Target.local else 4) * stream
        + (7 if recon.trains else 2) * max(spans) * block_bytes  # weights, a snapshot, gradients, moments, best, start
        + 5 * 4 * max(columns for _, columns in shapes) ** 2  # a Hessian and what its factorisation needs
        + activations
    )
    evaluation = max(
        # Logits of the dense model beside those of the pruned one, and the dense states that they come from.
        (item.seq_len * (2 * vocabulary * item.batch_size + hidden * item.windows * len(item.corpora)) * 4
         for item in plan.evals.values() if item.corpora),
        default=0,
    )  # fmt: skip
    weights_bytes = sum(param.numel() * param.element_size() for param in skeleton.parameters())
    so_far = peak_memory_bytes(device) + (OVERHEAD if device.type == "cpu" else 0)
    peak = so_far + weights_bytes + max(walk, evaluation)
    return Cost(forwards, trained, int(peak), flops / (EFFICIENCY * matrix_rate(device)))


def size_of(rows: slice) -> int:
    """Return the number of rows of a slice with both ends."""
    return int(rows.stop - rows.start)


def matrix_rate(device: torch.device) -> float:
    """Measure float32 matrix products, in floating point operations a second; takes some tens of milliseconds."""
    size = 1024
    one = torch.ones(size, size, device=device)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        (one @ one).sum().item()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
