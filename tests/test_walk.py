import copy
import dataclasses
import itertools

import pytest
import torch

from reprune.blocks import decoder_blocks, linears
from reprune.cost import count_forwards
from reprune.errors import NumericalError
from reprune.recon.reconstruction import Unit
from reprune.walk import CALIB, measure, sparsity

PRUNERS = ["magnitude", "wanda", "sparsegpt"]
RECONS = ["none", "br", "gp", "cr", "decoupled"]
WIDE = ["recon.window=3", "recon.stride=2"]
GENTLE = ["recon.learning_rate=1e-4", "recon.warmup=0", "recon.epochs=2"]  # every window then ends at its best


def weights(model):
    """(block, linear) -> weight."""
    return {
        (index, name): linear.weight
        for index, block in enumerate(decoder_blocks(model))
        for name, linear in linears(block).items()
    }


@torch.no_grad()
def states(model, tokens):
    """The hidden states after every block."""
    seen = []
    handles = [block.register_forward_hook(lambda _, __, out: seen.append(out)) for block in decoder_blocks(model)]
    model(input_ids=tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return [out[0] if isinstance(out, tuple) else out for out in seen]


def by_hand(dense, pruned, corpora):
    """corpus -> [(mse, relative)] of a dense and a finished pruned model, block by block."""
    return {
        name: [
            (((p - d) ** 2).double().mean().item(), (((p - d) ** 2).double().sum() / (d**2).double().sum()).item())
            for p, d in zip(states(pruned, tokens), states(dense, tokens), strict=True)
        ]
        for name, tokens in corpora.items()
    }


def plain(records):
    """Records without what differs from run to run."""
    dicts = [record.as_dict() for record in records]
    for item in dicts:
        del item["seconds"], item["peak_memory_bytes"]
    return dicts


@pytest.mark.parametrize("pruner", PRUNERS)
def test_sparsity_zero_changes_nothing(tiny_model, walked, pruner):
    model = tiny_model(3)
    before = copy.deepcopy(model.state_dict())
    _, records = walked(model, [f"pruner={pruner}", "recon=none", "sparsity.ratio=0"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for record in records:
        for errors in (record.before, record.after):
            assert {(error.mse, error.relative) for error in errors.values()} == {(0.0, 0.0)}
        assert all(linear.achieved == 0 for linear in record.linears.values())


@pytest.mark.parametrize("overrides", [["recon=none"], ["recon=gp"], ["recon=cr"], ["recon=br", *WIDE]], ids=str)
def test_errors_equal_those_computed_by_hand(tiny_model, walked, tokens, overrides):
    corpora = {CALIB: tokens(6), "other": tokens(4, seed=1), "third": tokens(3, seed=2)}
    dense, model = tiny_model(4), tiny_model(4)
    _, records = walked(model, overrides, corpora)
    assert [record.block for record in records] == [0, 1, 2, 3]
    for name, blocks in by_hand(dense, model, corpora).items():
        for record, (mse, relative) in zip(records, blocks, strict=True):
            assert record.after[name].mse == pytest.approx(mse, rel=1e-4)
            assert record.after[name].relative == pytest.approx(relative, rel=1e-4)
            assert relative > 0


def test_before_is_the_error_of_the_pruned_block_behind_finished_ones(tiny_model, walked, tokens):
    corpora = {CALIB: tokens(6), "other": tokens(4, seed=1)}
    _, records = walked(tiny_model(3), ["recon=gp", "recon.loss=mse", *GENTLE], corpora)
    for record in records:
        (fit,) = record.fits
        # gp trains on this very error, so it ties what pruning left and what training reached to the records.
        assert fit.start == pytest.approx(record.before[CALIB].mse, rel=1e-4)
        assert fit.best == pytest.approx(record.after[CALIB].mse, rel=1e-4)
    # Block 0 has nothing in front of it: pruned alone it must show the same.
    _, alone = walked(tiny_model(3), ["recon=none"], corpora)
    assert alone[0].after == records[0].before


@pytest.mark.parametrize(("pruner", "recon"), [*itertools.product(PRUNERS, RECONS)])
def test_pruned_weights_stay_zero(tiny_model, walked, pruner, recon):
    model = tiny_model(3)
    _, records = walked(model, [f"pruner={pruner}", f"recon={recon}", "sparsity.ratio=0.6"])
    found = weights(model)
    for (index, name), weight in found.items():
        record = records[index].linears[name]
        zeros = (weight == 0).sum().item()
        assert record.size == weight.numel()
        assert zeros == round(record.achieved * record.size)
        assert zeros == pytest.approx(0.6 * record.size, abs=weight.shape[0])  # rows are rounded one by one
        assert weight.isfinite().all()
    total = sum((weight == 0).sum().item() for weight in found.values())
    assert sparsity(records) == pytest.approx(total / sum(weight.numel() for weight in found.values()), abs=1e-6)


@pytest.mark.parametrize("pruner", PRUNERS)
def test_two_of_four(tiny_model, walked, pruner):
    model = tiny_model(2)
    walked(model, [f"pruner={pruner}", "recon=cr", "sparsity.ratio=null", "sparsity.pattern='2:4'"])
    for weight in weights(model).values():
        assert (weight.unflatten(1, (-1, 4)) == 0).sum(-1).eq(2).all()


def test_only_the_linears_of_blocks_change(tiny_model, walked):
    dense, model = tiny_model(2), tiny_model(2)
    walked(model, ["recon=gp", "recon.trainable=weights"])
    linear = {id(weight) for weight in weights(model).values()}
    for (name, before), (_, after) in zip(dense.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(before, after) == (id(after) not in linear), name


@pytest.mark.parametrize("pruner", PRUNERS)
def test_gp_ends_nearer_to_the_dense_model(tiny_model, walked, pruner):
    _, plain_records = walked(tiny_model(3), [f"pruner={pruner}", "recon=none"])
    _, records = walked(tiny_model(3), [f"pruner={pruner}", "recon=gp", "recon.epochs=10"])
    assert records[-1].after[CALIB].relative < plain_records[-1].after[CALIB].relative


def test_br_lowers_its_own_error(tiny_model, walked):
    _, records = walked(tiny_model(3), ["recon=br", "recon.epochs=10"])
    assert all(fit.best < fit.start for record in records for fit in record.fits)
    assert all(len(record.fits) == 1 for record in records)


@pytest.mark.parametrize("recon", ["gp", "cr"])
def test_the_seed_decides_every_bit(tiny_model, walked, recon):
    first, again, other = (tiny_model(3) for _ in range(3))
    records = [walked(model, [f"recon={recon}"], seed=seed)[1] for model, seed in ((first, 0), (again, 0), (other, 1))]
    assert plain(records[0]) == plain(records[1])
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), again.parameters(), strict=True))
    differs = [not torch.equal(one, two) for one, two in zip(first.parameters(), other.parameters(), strict=True)]
    assert any(differs)


@pytest.mark.parametrize("keep_best", ["calib", "heldout"])
@pytest.mark.parametrize("recon", ["br", "gp", "cr", "decoupled"])
def test_training_that_makes_it_worse_is_undone(tiny_model, walked, recon, keep_best):
    absurd = ["recon.learning_rate=1.0", "recon.warmup=0", "recon.schedule=constant", f"recon.keep_best={keep_best}"]
    pruned, model = tiny_model(3), tiny_model(3)
    _, plain_records = walked(pruned, ["recon=none"])
    _, records = walked(model, [f"recon={recon}", *absurd])
    for record, without in zip(records, plain_records, strict=True):
        assert all((fit.best_step, fit.best) == (0, fit.start) for fit in record.fits)
        for name, error in record.after.items():
            assert error.relative == pytest.approx(without.after[name].relative, rel=1e-5)
    assert all(torch.equal(one, two) for one, two in zip(pruned.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(("dtype", "pruner"), [("float32", "wanda"), ("bfloat16", "magnitude")])
@pytest.mark.parametrize(
    ("overrides", "keep_best"),
    [(["recon=none"], "none")]
    + [
        (overrides, keep_best)
        for overrides in [
            *([f"recon={recon}"] for recon in RECONS[1:]),
            *([f"recon={recon}", *WIDE] for recon in ("br", "gp", "decoupled")),
        ]
        for keep_best in ("none", "calib", "heldout")
    ],
    ids=str,
)  # fmt: skip
def test_the_estimate_counts_every_forward_pass(
    tiny_model, walked, plan_of, tokens, overrides, keep_best, dtype, pruner
):
    overrides = [*overrides, *GENTLE, f"recon.keep_best={keep_best}", "recon.evaluations=2"]
    corpora = {CALIB: tokens(6), "same": tokens(6)}  # the held-out error then falls with the other
    _, records = walked(tiny_model(4, dtype), [f"pruner={pruner}", *overrides], corpora)
    # The count is exact only where no window goes back to an earlier iterate.
    assert all(fit.best_step in (None, fit.steps) for record in records for fit in record.fits)
    recon = plan_of(overrides).recon
    expected = count_forwards(recon, pruner == "wanda", dtype == "bfloat16", 4, calib=6, heldout=6)
    assert records[-1].forwards == expected


@pytest.mark.parametrize("pruner", ["magnitude", "wanda"])
@pytest.mark.parametrize("recon", ["none", "br", "cr", "decoupled"])
def test_the_estimate_counts_rows_that_serve_for_one_purpose(tiny_model, walked, plan_of, tokens, pruner, recon):
    overrides = [f"pruner={pruner}", f"recon={recon}", *([] if recon == "none" else GENTLE)]
    rows = {"mask_rows": slice(0, 5), "recon_rows": slice(2, None)}
    _, records = walked(tiny_model(3), overrides, {CALIB: tokens(9)}, **rows)
    assert all(fit.best_step in (None, fit.steps) for record in records for fit in record.fits)
    settings = plan_of(overrides).recon
    expected = count_forwards(settings, pruner == "wanda", False, 3, calib=9, heldout=0, choose=5, learn=7)
    assert records[-1].forwards == expected


@pytest.mark.parametrize("recon", ["gp", "br", "decoupled", "cr"])
def test_masks_and_weights_come_from_their_own_rows(tiny_model, walked, tokens, recon):
    both = tokens(9)
    first, alone = tiny_model(1), tiny_model(1)
    walked(first, [f"recon={recon}", "pruner=wanda"], {CALIB: both}, mask_rows=slice(0, 4), recon_rows=slice(4, 9))
    walked(alone, ["recon=none", "pruner=wanda"], {CALIB: both[:4]})
    for weight, chosen in zip(weights(first).values(), weights(alone).values(), strict=True):
        assert torch.equal(weight != 0, chosen != 0)  # the mask is that of the first four alone
    # In a model of one block, what reconstruction learns is what it learns from the same rows in another place.
    moved = tiny_model(1)
    order = torch.cat([both[:4], both[4:], tokens(3, seed=5)])
    walked(moved, [f"recon={recon}", "pruner=wanda"], {CALIB: order}, mask_rows=slice(0, 4), recon_rows=slice(4, 9))
    for weight, other in zip(weights(first).values(), weights(moved).values(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-6)


MORE = {
    "lr": ["recon=lr"],
    "lr dense": ["recon=lr", "recon.target=dense"],
    "gp after lr": ["recon=gp", "recon.init=least_squares"],
    "cr after lr": ["recon=cr", "recon.init=least_squares", "recon.heldout_evaluations=3"],
    "br after lr": ["recon=br", "recon.init=least_squares"],
    "gp watched": ["recon=gp", "recon.heldout_evaluations=3", "recon.evaluations=2"],
    "cr watched": ["recon=cr", "recon.heldout_evaluations=1", "recon.keep_best=none"],
    "decoupled watched": ["recon=decoupled", "recon.heldout_evaluations=2"],
    "by heldout": ["recon=gp", "recon.keep_best=heldout", "recon.heldout_evaluations=3", "recon.evaluations=2"],
    "all": ["recon=br", "recon.window=all"],
    "submodule": ["recon=gp", "recon.unit=submodule"],
    "linear": ["recon=br", "recon.unit=linear", "recon.keep_best=none"],
}


@pytest.mark.parametrize(
    "rows",
    [{}, *({"mask_rows": slice(0, stop), "recon_rows": slice(6 - stop, None)} for stop in (5, 3))],
    ids=["all", "overlap", "apart"],
)
@pytest.mark.parametrize("pruner", ["magnitude", "sparsegpt"])
@pytest.mark.parametrize("name", MORE)
def test_the_estimate_counts_the_passes_of_the_engine(tiny_model, walked, plan_of, tokens, name, pruner, rows):
    gentle = [] if name.startswith("lr") else GENTLE
    if name == "linear":
        gentle = [item for item in gentle if "warmup" not in item]
    overrides = [*gentle, *MORE[name]] if "recon=" in "".join(MORE[name]) else MORE[name]
    corpora = {CALIB: tokens(6), "same": tokens(6)}
    _, records = walked(tiny_model(4), [f"pruner={pruner}", *overrides], corpora, **rows)
    assert all(fit.best_step in (None, fit.steps) for record in records for fit in record.fits)
    recon = plan_of(overrides).recon
    units = {Unit.block: 1, Unit.submodule: 2, Unit.linear: 7}[recon.unit]
    parts = dict.fromkeys(("choose", "learn"), rows["mask_rows"].stop) if rows else {}
    expected = count_forwards(recon, pruner == "sparsegpt", False, 4, 6, 6, units=units, **parts)
    assert records[-1].forwards == expected


def test_layer_wise_reconstruction_lowers_the_error_of_every_mask(tiny_model, walked, tokens):
    for pruner in PRUNERS:
        _, none = walked(tiny_model(3), [f"pruner={pruner}", "recon=none"])
        _, lr = walked(tiny_model(3), [f"pruner={pruner}", "recon=lr"])
        assert lr[0].before == none[0].before
        assert lr[-1].after[CALIB].relative < none[-1].after[CALIB].relative
        for record in lr:
            assert record.fits == []
            for linear in record.linears.values():
                start, loss, steps, residual = linear.solved
                assert loss <= start
                assert (steps < 100) == (residual <= 1e-3)


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize("name", ["lr dense", "cr after lr", "submodule", "linear", "all"])
def test_masks_survive_every_solver(tiny_model, walked, pruner, name):
    bare, model = tiny_model(3), tiny_model(3)
    walked(bare, [f"pruner={pruner}", "recon=none"])
    walked(model, [f"pruner={pruner}", *MORE[name]])
    first = {key: weight for key, weight in weights(bare).items() if key[0] == 0}
    for key, weight in first.items():  # the first block's mask does not depend on what reconstruction did before it
        assert torch.equal(weights(model)[key] != 0, weight != 0)


def test_the_closed_form_is_a_better_start(tiny_model, walked):
    _, plain = walked(tiny_model(3), ["recon=gp", "pruner=wanda"])
    _, solved = walked(tiny_model(3), ["recon=gp", "pruner=wanda", "recon.init=least_squares"])
    assert solved[0].fits[0].start < plain[0].fits[0].start
    assert solved[-1].after[CALIB].relative < plain[-1].after[CALIB].relative


def test_pieces_are_recorded_in_order(tiny_model, walked):
    _, records = walked(tiny_model(2), ["recon=gp", "recon.unit=submodule"])
    for record in records:
        assert [fit.unit for fit in record.fits] == ["self_attn", "mlp"]
        assert all(fit.best <= fit.start for fit in record.fits)
        assert record.after[CALIB].relative < record.before[CALIB].relative


def test_held_out_errors_along_the_way(tiny_model, walked, tokens):
    corpora = {CALIB: tokens(6), "other": tokens(4, seed=1), "third": tokens(3, seed=2)}
    _, records = walked(tiny_model(2), ["recon=gp", "recon.heldout_evaluations=2", *GENTLE], corpora)
    for record in records:
        (fit,) = record.fits
        assert [step for step, _ in fit.heldout] == [0, fit.steps // 2, fit.steps]
        for errors, there in ((fit.heldout[0][1], record.before), (fit.heldout[-1][1], record.after)):
            assert errors == {name: pytest.approx(there[name].relative, rel=1e-6) for name in ("other", "third")}
    _, blind = walked(tiny_model(2), ["recon=gp", *GENTLE], corpora)
    assert [record.after for record in blind] == [record.after for record in records]  # looking changes nothing


def test_a_diverging_rate_is_caught_and_reported(tiny_model, walked):
    overrides = ["recon.learning_rate=30", "recon.warmup=0", "recon.schedule=constant", "recon.evaluations=3"]
    _, records = walked(tiny_model(2), ["recon=gp", *overrides])
    for record in records:
        (fit,) = record.fits
        assert fit.diverged
        assert fit.last > fit.start == fit.best
        assert record.after == record.before


def test_patience_stops_a_hopeless_training(tiny_model, walked):
    overrides = ["recon.learning_rate=30", "recon.warmup=0", "recon.evaluations=6", "recon.epochs=6"]
    _, records = walked(tiny_model(1), ["recon=gp", *overrides, "recon.patience=2"])
    (fit,) = records[0].fits
    assert (fit.steps, len(fit.evaluations)) == (6, 2)  # of 18: two of six evaluations


def test_an_anchor_keeps_weights_near_their_start(tiny_model, walked):
    moved = {}
    for anchor in (0, 100, 1e9):
        start, model = tiny_model(1), tiny_model(1)
        walked(start, ["recon=none"])
        walked(model, ["recon=gp", f"recon.anchor={anchor}", "recon.keep_best=none"])
        gaps = [(a - b).norm() for a, b in zip(weights(model).values(), weights(start).values(), strict=True)]
        moved[anchor] = float(sum(gaps))
    assert 0 == moved[1e9] < moved[100] < moved[0]


def test_checkpointing_changes_memory_and_nothing_else(tiny_model, walked):
    one, other = tiny_model(4), tiny_model(4)
    walked(one, ["recon=gp", "recon.window=all"])
    walked(other, ["recon=gp", "recon.window=all", "recon.checkpointing=true"])
    for a, b in zip(weights(one).values(), weights(other).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_streams_in_bfloat16(tiny_model, walked):
    _, full = walked(tiny_model(3), ["recon=gp"])
    _, half = walked(tiny_model(3), ["recon=gp"], stream_dtype=torch.bfloat16)
    for one, other in zip(full, half, strict=True):
        for name in one.after:
            assert other.after[name].relative == pytest.approx(one.after[name].relative, rel=0.05)
            assert other.after[name].relative != one.after[name].relative


def test_typical_error_and_token_share():
    dense, pruned = torch.ones(2, 100, 4), torch.ones(2, 100, 4)
    dense[0, 0], pruned[0, 0] = 1000.0, 900.0  # one massive token, off by a tenth
    pruned[:, 1:] = 0.5
    error = measure(pruned, dense)
    others = 198 * 4 * 0.25
    assert error.mse == pytest.approx((4 * 100.0**2 + others) / 800)
    assert error.relative == pytest.approx((4 * 100.0**2 + others) / (4 * 1000.0**2 + 199 * 4))
    assert error.mse_typical == pytest.approx(0.25)
    # The two tokens of largest norm: the massive one, and one of the others.
    assert error.token_share == pytest.approx(4 * 100.0**2 / (4 * 100.0**2 + others), rel=1e-3)


def test_windows_of_cross_block_reconstruction(plan_of):
    recon = plan_of(["recon=cr"]).recon
    assert [[*window.blocks] for window in recon.windows(4)] == [[0], [0, 1], [1, 2], [2, 3], [3]]
    assert [[*window.blocks] for window in plan_of(["recon=gp"]).recon.windows(3)] == [[0], [1], [2]]


def test_every_block_enters_and_leaves_once(plan_of):
    base = plan_of(["recon=gp"]).recon
    for size, depth in itertools.product(range(1, 6), range(1, 12)):
        for stride in range(1, size + 1):
            recon = dataclasses.replace(base, window=size, stride=stride)
            windows = recon.windows(depth)
            entered, left = [], []
            for window in windows:
                entered += window.entering
                held = set(entered) - set(left)
                assert held == set(window.blocks), (size, stride, depth)  # so inputs and targets are at hand
                assert window.blocks.start == len(left)
                left += window.leaving
            assert entered == left == list(range(depth)), (size, stride, depth)
            assert all(1 <= len(window.blocks) <= size for window in windows)


def test_a_bfloat16_model_is_stored_as_bfloat16(tiny_model, walked, tokens):
    corpora = {CALIB: tokens(6), "other": tokens(4, seed=1)}
    dense, model = tiny_model(3, "bfloat16"), tiny_model(3, "bfloat16")
    _, records = walked(model, ["recon=gp"], corpora)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    for (index, name), weight in weights(model).items():
        linear = records[index].linears[name]
        assert (weight == 0).sum().item() == round(linear.achieved * linear.size)
    assert all(record.rounding.keys() == corpora.keys() for record in records)
    assert any(record.rounding[CALIB] != 0 for record in records)
    # What is recorded is the error of the stored weights, computed in float32.
    for name, blocks in by_hand(dense.float(), model.float(), corpora).items():
        for record, (_, relative) in zip(records, blocks, strict=True):
            assert record.after[name].relative == pytest.approx(relative, rel=1e-4)


def test_float32_records_no_rounding(tiny_model, walked):
    _, records = walked(tiny_model(2), ["recon=none"])
    assert [record.rounding for record in records] == [{}, {}]


@pytest.mark.parametrize("overrides", [["recon=gp"], ["recon=cr"], ["recon=br", *WIDE]], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_no_deeper_than_the_window(tiny_model, walked, tokens, overrides, depth):
    corpora = {CALIB: tokens(6)}  # and no held-out corpus
    dense, model = tiny_model(depth), tiny_model(depth)
    _, records = walked(model, overrides, corpora)
    assert [record.block for record in records] == list(range(depth))
    for record, (mse, _) in zip(records, by_hand(dense, model, corpora)[CALIB], strict=True):
        assert record.after[CALIB].mse == pytest.approx(mse, rel=1e-4)


def test_a_nan_in_a_weight_names_block_and_parameter(tiny_model, walked):
    model = tiny_model(3)
    decoder_blocks(model)[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NumericalError, match=r"dense weight mlp\.up_proj\.weight of block 1"):
        walked(model, ["recon=none"])


def test_a_norm_stays_a_norm(tiny_model, walked):
    model = tiny_model(2)
    walked(model, ["recon=gp", "recon.trainable=all"])
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    assert any(not torch.equal(norm.weight, torch.ones_like(norm.weight)) for norm in norms)
    assert not any(param.requires_grad for block in decoder_blocks(model) for param in block.parameters())
