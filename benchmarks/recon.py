"""Time that reconstruction needs to reach the error of the published recipe.

    python benchmarks/recon.py     # SmolLM2, 32 x 512 tokens, the first 4 blocks, after Wanda and magnitude
    python benchmarks/recon.py --model tiny --count 8 --seq-len 64 --blocks 2

The recipe written plainly: Adam at 2e-4 falling in a line, no warm-up, 5 epochs of 8 sequences, the product of mask and
weight in the forward pass. Ours: conf/recon/gp.yaml with ever more epochs, until the last block's error on calibration
text is no higher than the recipe's. Both start from the same masks and aim at the dense stream. Seconds are those of
reconstruction alone. The share of the matrix peak counts the products of linears and attention, forward and backward.
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from torch import nn
from torch.nn.functional import mse_loss
from walk import Masked

from reprune import cli
from reprune.blocks import decoder_blocks, linears
from reprune.config import build_plan
from reprune.cost import matrix_rate
from reprune.draw import Split, draw
from reprune.streams import Stream, forward_block
from reprune.walk import Walk, measure

CONF = Path(__file__).resolve().parent.parent / "conf"
CPU = torch.device("cpu")
RECIPE = {"epochs": 5, "batch": 8, "rate": 2e-4}


def plan_of(*overrides: str):
    """Compose and build a plan."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build_plan(compose("config", [*overrides]), cli.load_option)


def recipe(model, masks, corpora, blocks: int):
    """The published reconstruction written plainly; returns seconds of training and the last block's errors."""
    seconds = 0.0
    streams = {name: Stream.enter(model, name, tokens, RECIPE["batch"], CPU, CPU) for name, tokens in corpora.items()}
    dense = {name: stream.pruned for name, stream in streams.items()}
    pruned = dict(dense)
    for index, block in enumerate(decoder_blocks(model)[:blocks]):
        block.float().requires_grad_(False)
        dense = {name: stream.run(block, index, dense[name], "dense") for name, stream in streams.items()}
        for name, linear in linears(block).items():
            linear.weight.data *= masks[index][name]
            parent, _, child = name.rpartition(".")
            setattr(block.get_submodule(parent), child, Masked(linear))
        params = [param.requires_grad_(True) for param in block.parameters() if param.ndim > 1]
        inputs, target = pruned["calib"], dense["calib"]
        total = RECIPE["epochs"] * len(inputs) // RECIPE["batch"]
        optimizer = torch.optim.AdamW(params, RECIPE["rate"], betas=(0.9, 0.95), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, total=total: 1 - step / total)
        begin = time.perf_counter()
        for _ in range(RECIPE["epochs"]):
            for rows in torch.randperm(len(inputs)).split(RECIPE["batch"]):
                output = forward_block(block, inputs[rows], streams["calib"].call(index, len(rows)))
                loss = mse_loss(output, target[rows])
                loss.backward()
                nn.utils.clip_grad_norm_(params, 1000)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                loss.item()
        seconds += time.perf_counter() - begin
        block.requires_grad_(False)
        pruned = {name: stream.run(block, index, pruned[name], "pruned") for name, stream in streams.items()}
    return seconds, {name: measure(pruned[name], dense[name]).relative for name in corpora}


def ours(model, plan, corpora, blocks: int):
    """The walk with the settings of a plan; returns seconds of training and the last block's errors, and masks."""
    walk = Walk(
        model, pruner=plan.pruner, recon=plan.recon, allocation=plan.allocation, corpora=corpora,
        batch_size=plan.batch_size, device=CPU, stream_device=CPU, seed=plan.seed,
    )  # fmt: skip
    seconds, masks = 0.0, []
    for record in walk:
        seconds += record.seconds.get("reconstruction", 0.0)
        masks.append({name: m.weight != 0 for name, m in linears(decoder_blocks(model)[record.block]).items()})
        if len(masks) == blocks:
            break
    return seconds, {name: error.relative for name, error in record.after.items()}, masks


def main() -> None:
    """Run both sides for each pruner and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--heldout", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4, help="how many blocks to walk")
    parser.add_argument("--calib", default="sotu")
    parser.add_argument("--pruners", nargs="*", default=["wanda", "magnitude"])
    parser.add_argument("--epochs", type=float, nargs="*", default=[0.25, 0.5, 0.75, 1, 1.5, 2, 3])
    parser.add_argument("overrides", nargs="*", help="further config overrides, such as recon.learning_rate=5e-4")
    args = parser.parse_args()
    common = [
        f"model={args.model}", f"calib={args.calib}", "heldout=[]", "eval=[]", "run_name=benchmark",
        f"calib.count={args.count}", f"calib.seq_len={args.seq_len}", *args.overrides,
    ]  # fmt: skip
    plan = plan_of(*common)
    model, tokenizer = plan.model.load()
    corpora = {
        name: draw(
            plan.corpora[plan.calib], split, tokenizer, count, args.seq_len, plan.seed, False, name=args.calib
        ).tokens
        for name, split, count in (("calib", Split.calib, args.count), ("heldout", Split.heldout, args.heldout))
    }
    threads = torch.get_num_threads()
    print(f"{args.model}, {args.count} x {args.seq_len} tokens, block {args.blocks - 1}, {threads} threads")
    peak = matrix_rate(CPU)
    block = decoder_blocks(model)[0]
    weights = sum(linear.weight.numel() for linear in linears(block).values())
    width = model.config.hidden_size
    per_epoch = 3 * args.count * args.seq_len * args.blocks * (2 * weights + 2 * args.seq_len * width)
    for pruner in args.pruners:
        # Both sides prune a block as the pruner would with no reconstruction before it: the same zeros.
        _, before, masks = ours(
            copy.deepcopy(model), plan_of(*common, f"pruner={pruner}", "recon=none"), corpora, args.blocks
        )
        seconds, goal = recipe(copy.deepcopy(model), masks, corpora, args.blocks)
        print(f"\n{pruner:<26}{'seconds':>9}{'calib':>10}{'held out':>10}{'of peak':>9}")
        print(f"{'pruned only':<26}{'':>9}{before['calib']:>10.5f}{before['heldout']:>10.5f}")
        share = RECIPE["epochs"] * per_epoch / seconds / peak
        print(f"{'recipe, 5 epochs':<26}{seconds:>9.1f}{goal['calib']:>10.5f}{goal['heldout']:>10.5f}{share:>9.0%}")
        for epochs in args.epochs:
            settings = [f"pruner={pruner}", "recon=gp", f"recon.epochs={epochs}", "recon.keep_best=none"]
            spent, error, _ = ours(copy.deepcopy(model), plan_of(*common, *settings), corpora, args.blocks)
            share = epochs * per_epoch / spent / peak
            name = f"ours, {epochs:g} epochs"
            print(f"{name:<26}{spent:>9.1f}{error['calib']:>10.5f}{error['heldout']:>10.5f}{share:>9.0%}")
            if error["calib"] <= goal["calib"]:
                print(
                    f"{'recipe / ours':<26}{seconds / spent:>9.2f}{'':>10}{goal['heldout'] / error['heldout']:>10.3f}"
                )
                break
        else:
            print("ours did not reach the recipe's error")


if __name__ == "__main__":
    main()
