"""Each preset against the strategy written out plainly, with whole copies of the model and one batch of everything."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from reprune.blocks import decoder_blocks, linears
from reprune.walk import CALIB

DEPTH, STEPS, RATE = 4, 6, 3e-3
FULL = [
    "pruner=magnitude", "recon.epochs=null", f"recon.steps={STEPS}", "recon.batch_size=6",
    f"recon.learning_rate={RATE}",
    "recon.schedule=constant", "recon.warmup=0", "recon.keep_best=none",
]  # fmt: skip
WINDOWS = {
    "br": [[0], [1], [2], [3]],
    "gp": [[0], [1], [2], [3]],
    "decoupled": [[0], [1], [2], [3]],
    "cr": [[0], [0, 1], [1, 2], [2, 3], [3]],
    "wide": [[0, 1], [2, 3]],
    "all": [[0, 1, 2, 3]],
}
OVERRIDES = {
    **{name: [f"recon={name}"] for name in ("br", "gp", "decoupled", "cr")},
    "wide": ["recon=br", "recon.window=2", "recon.stride=2"],
    "all": ["recon=gp", "recon.window=all"],
}


def arguments(model, tokens):
    """What the model hands to its blocks beside the hidden states, and the states entering the first."""
    seen = {}

    def hook(_, args, kwargs):
        seen.update(kwargs, hidden=args[0] if args else kwargs["hidden_states"])

    handle = decoder_blocks(model)[0].register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    handle.remove()
    return seen.pop("hidden"), seen


def masks(block):
    """Exactly the larger half of each weight; ties do not occur in random weights."""
    result = {}
    for linear in linears(block).values():
        order = linear.weight.abs().flatten().argsort()
        keep = torch.ones(order.shape, dtype=torch.bool)
        keep[order[: round(0.5 * len(order))]] = False
        result[linear.weight] = keep.view_as(linear.weight)
    return result


def slow(dense, tokens, strategy):
    """The finished student and, for each block, its states on the tokens."""
    hidden, kwargs = arguments(dense, tokens)
    student = copy.deepcopy(dense)
    old, new = decoder_blocks(dense), decoder_blocks(student)

    def through(blocks, states):
        for block in blocks:
            out = block(states, **kwargs)
            states = out[0] if isinstance(out, tuple) else out
        return states

    keep = {}
    for window in WINDOWS[strategy]:
        for index in window:
            if not any(param in keep for param in new[index].parameters()):
                keep |= masks(new[index])
                for linear in linears(new[index]).values():
                    linear.weight.data *= keep[linear.weight]
        part = slice(window[0], window[-1] + 1)
        with torch.no_grad():
            on_dense, on_pruned = through(old[: part.start], hidden), through(new[: part.start], hidden)
            inputs = on_dense if strategy == "decoupled" else on_pruned
            target = through(old[part], on_pruned if strategy in ("br", "wide") else on_dense)
        params = [linear.weight for block in new[part] for linear in linears(block).values()]
        optimizer = torch.optim.AdamW(params, RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0, foreach=False)
        for param in params:
            param.requires_grad_(True)
        for _ in range(STEPS):
            optimizer.zero_grad()
            mse_loss(through(new[part], inputs), target).backward()
            for param in params:
                param.grad *= keep[param]
            optimizer.step()
        for param in params:
            param.requires_grad_(False)
    return student


@pytest.mark.parametrize("strategy", WINDOWS)
def test_equals_the_strategy_written_out(tiny_model, walked, tokens, strategy):
    torch.manual_seed(0)
    dense, model = tiny_model(DEPTH).requires_grad_(False), tiny_model(DEPTH)
    student = slow(dense, tokens(6), strategy)
    walked(model, [*OVERRIDES[strategy], *FULL], {CALIB: tokens(6)})
    for index, (fast, plain) in enumerate(zip(decoder_blocks(model), decoder_blocks(student), strict=True)):
        for name, linear in linears(fast).items():
            other = linears(plain)[name].weight
            assert torch.equal(linear.weight != 0, other != 0), (index, name)
            # Adam turns rounding of a small gradient into a step of full size, so single weights may differ a little.
            gap = (linear.weight - other).norm() / other.norm()
            assert gap < 2e-3, (index, name, gap)
    change = [
        (a.weight - b.weight)[b.weight != 0].norm().item()
        for a, b in zip(_all_linears(model), _all_linears(dense), strict=True)
    ]
    assert min(change) > 0.01  # training did move the weights, by far more than the two sides differ


def _all_linears(model: nn.Module):
    return [linear for block in decoder_blocks(model) for linear in linears(block).values()]


@pytest.mark.parametrize("target", ["local", "dense"])
def test_layer_wise_equals_a_solve_for_each_row(tiny_model, walked, tokens, target):
    dense, model = tiny_model(2), tiny_model(2)
    walked(
        model,
        ["pruner=magnitude", "recon=lr", f"recon.target={target}", "recon.tolerance=1e-8", "recon.damping=0"],
        {CALIB: tokens(9)},
    )
    hidden, kwargs = arguments(dense, tokens(9))
    first, second = decoder_blocks(dense)
    pruned_states = decoder_blocks(model)[0](hidden, **kwargs)
    dense_states = first(hidden, **kwargs)

    def inputs_of(block, states):
        seen = {}
        handles = [
            linear.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0].flatten(0, 1)))
            for name, linear in linears(block).items()
        ]
        block(states, **kwargs)
        for handle in handles:
            handle.remove()
        return seen

    with torch.no_grad():
        seen, seen_dense = inputs_of(second, pruned_states), inputs_of(second, dense_states)
    for name, linear in linears(decoder_blocks(model)[1]).items():
        x = seen[name].double()
        y = (seen_dense if target == "dense" else seen)[name].double() @ linears(second)[name].weight.double().T
        for row, kept in enumerate(linear.weight != 0):
            exact = torch.linalg.lstsq(x[:, kept], y[:, row : row + 1], driver="gelsd").solution[:, 0]
            torch.testing.assert_close(linear.weight[row, kept].double(), exact, rtol=2e-3, atol=2e-4)
