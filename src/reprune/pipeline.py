"""One run: config -> model -> corpora -> walk the blocks (prune, reconstruct, measure) -> evaluate -> run directory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reprune import plots, report
from reprune.config import Plan
from reprune.cost import estimate
from reprune.devices import peak_memory_bytes, pick_device
from reprune.draw import Draw, Split, draw, manifest
from reprune.errors import RepruneError
from reprune.evaluation import Subject, as_dense, measure_dense, measure_pruned, model_id, write_results
from reprune.model.pretrained import use_bos
from reprune.rundir import RunDir, environment
from reprune.terminal import block_header, block_line, duration, log, logging_to, size
from reprune.walk import CALIB, BlockRecord, Walk, sparsity


def run(plan: Plan, path: Path) -> dict[str, float]:
    """Carry out a plan and leave a complete run directory.

    Args:
        plan: checked settings and built parts.
        path: the run directory.

    Returns:
        The final numbers, as in metrics.json; empty if the plan says dry_run.

    Raises:
        RepruneError: something failed that the user can mend; the directory keeps every block that was finished.
    """
    rundir = RunDir(path)
    with logging_to(path / "run.log"), _said_where(rundir) as at:
        begin = time.perf_counter()
        device = pick_device(plan.model.device)
        torch.use_deterministic_algorithms(True, warn_only=True)
        rundir.write_yaml("config.resolved.yaml", plan.resolved)
        rundir.write_json("environment.json", environment(device))

        at("while reading the model's config")
        plan.check_length()
        for item in plan.evals.values():
            item.check()
        _say_plan(plan, device)
        if plan.dry_run:
            return {}

        at("while loading the model")
        model, tokenizer = plan.model.load()

        at("while drawing text")
        bos = use_bos(plan.model.bos, tokenizer)
        draws, tests = draw_corpora(plan, tokenizer, bos)
        rundir.write_json("calib.json", _manifests(draws, tests))

        at("while evaluating the dense model")
        same = model_id(plan.evals, model, tokenizer)
        subjects = {name: Subject(model.to(device), tokenizer, _tokens(tests[name])) for name in plan.evals}
        dense = {name: measure_dense(name, item, subjects[name], same) for name, item in plan.evals.items()}
        metrics = {key: value for item in dense.values() for key, value in as_dense(item.metrics).items()}

        corpora = {name: drawn.tokens for name, drawn in draws.items()}
        log.info(block_header(list(corpora), plan.recon.changes))
        records = []
        at("while entering the first block")
        walk = Walk(
            model.to("cpu"),
            pruner=plan.pruner,
            recon=plan.recon,
            allocation=plan.allocation,
            corpora=corpora,
            batch_size=plan.batch_size,
            device=device,
            stream_device=torch.device(plan.stream_device),
            stream_dtype=getattr(torch, plan.stream_dtype),
            seed=plan.seed,
        )
        started = time.perf_counter()
        at("in block 0")
        for record in walk:
            records.append(record)
            rundir.append_block(record.as_dict())
            log.info(block_line(record, list(corpora), plan.recon.changes))
            _warn(plan, record)
            at(f"in block {record.block + 1}")
        metrics |= _block_metrics(records, time.perf_counter() - started)

        at("while evaluating the pruned model")
        model.to(device)
        pruned = {name: measure_pruned(name, item, subjects[name], dense[name]) for name, item in plan.evals.items()}
        metrics |= {key: value for item in pruned.values() for key, value in item.metrics.items()}
        write_results(rundir, {name: {"dense": dense[name], "pruned": pruned[name]} for name in plan.evals})

        at("while writing plots and report")
        plots.draw_all(rundir)
        metrics |= {"seconds": time.perf_counter() - begin, "peak_memory_bytes": peak_memory_bytes(device)}
        report.write(rundir, metrics)
        rundir.write_json("metrics.json", metrics)
        _say_summary(plan, rundir, metrics)
    return metrics


def draw_corpora(plan: Plan, tokenizer: Any, bos: bool) -> tuple[dict[str, Draw], dict[str, dict[str, Draw]]]:
    """Draw every sequence of a run: calibration and held-out, and for each evaluation its test windows.

    Returns:
        stream name -> draw (`calib`, then the held-out corpora), and evaluation -> corpus -> draw.
    """

    def take(name: str, split: Split, count: int, seq_len: int, key: str) -> Draw:
        return draw(plan.corpora[name], split, tokenizer, count, seq_len, plan.seed, bos, name=name, key=key)

    draws = {CALIB: take(plan.calib, Split.calib, plan.count, plan.seq_len, "calib")}
    for name in plan.heldout:
        draws[name] = take(name, Split.heldout, plan.heldout_count, plan.seq_len, f"heldout {name}")
    tests = {
        key: {name: take(name, Split.test, item.windows, item.seq_len, f"eval.{key}") for name in item.corpora}
        for key, item in plan.evals.items()
    }
    return draws, tests


def _tokens(tests: dict[str, Draw]) -> dict[str, Tensor]:
    return {corpus: drawn.tokens for corpus, drawn in tests.items()}


def _manifests(draws: dict[str, Draw], tests: dict[str, dict[str, Draw]]) -> dict[str, Any]:
    return {
        "calib": manifest(draws[CALIB]),
        "heldout": {name: manifest(drawn) for name, drawn in draws.items() if name != CALIB},
        "eval": {key: {name: manifest(drawn) for name, drawn in items.items()} for key, items in tests.items()},
    }


def _block_metrics(records: list[BlockRecord], seconds: float) -> dict[str, float]:
    """Flatten block errors, `<name>/<corpus>/<block>`, where `error` is the relative one, and what the walk took."""
    metrics: dict[str, float] = {}
    for record in records:
        for corpus, error in record.after.items():
            metrics[f"error/{corpus}/{record.block}"] = error.relative
            for name in ("mse", "mse_typical", "token_share"):
                metrics[f"{name}/{corpus}/{record.block}"] = getattr(error, name)
    return metrics | {"sparsity": sparsity(records), "walk_seconds": seconds}


def _say_plan(plan: Plan, device: torch.device) -> None:
    skeleton = plan.model.skeleton()
    cost = estimate(plan, skeleton, device)
    sparsity = plan.allocation
    log.info(f"model     {plan.model.describe()} on {device}")
    log.info(
        f"sparsity  {sparsity.allocate(1)[0]:g} {sparsity.resolved_pattern()}, pruner {type(plan.pruner).__name__}"
    )
    log.info(
        f"text      {plan.calib}: {plan.count} x {plan.seq_len} tokens; held out: {', '.join(plan.heldout) or 'none'}"
    )
    log.info(
        f"plan      {cost.forwards} block forwards and {cost.trained} training passes (in sequences), "
        f"about {size(cost.peak_bytes)} of memory and {duration(cost.seconds)}"
    )


def _warn(plan: Plan, record: BlockRecord) -> None:
    for name, linear in record.linears.items():
        if linear.short_group:
            log.warning(
                f"block {record.block} {name}: {linear.short_group} last columns do not fill a group of the pattern; "
                f"they keep at most as many weights as a whole group, so {linear.achieved:.4f} instead of "
                f"{linear.asked:.4f} is removed"
            )
        if linear.damping is not None and linear.damping > plan.pruner.damping:
            log.warning(f"block {record.block} {name}: its Hessian needed damping {linear.damping:g}")
    for fit in record.fits:
        if fit.best_step is not None and fit.best_step != fit.steps:
            what = "training diverged, its loss ended above its start; " if fit.diverged else ""
            log.warning(f"block {record.block} ({fit.unit}): {what}kept step {fit.best_step} of {fit.steps}")


def _say_summary(plan: Plan, rundir: RunDir, metrics: dict[str, float]) -> None:
    for item in plan.evals.values():
        log.info("")
        log.info(item.table(metrics))
    log.info("")
    log.info(
        f"{metrics['sparsity']:.1%} of the weights of the blocks' linears are zero. Walk "
        f"{duration(metrics['walk_seconds'])}, whole run {duration(metrics['seconds'])}, peak memory "
        f"{size(metrics['peak_memory_bytes'])}."
    )
    log.info(f"Results: {rundir.path} (report.html shows them)")


@contextmanager
def _said_where(rundir: RunDir) -> Iterator[Any]:
    """Keep track of what a run is doing, and say it if the run dies."""
    stage = ["while starting"]

    def at(name: str) -> None:
        stage[0] = name

    try:
        yield at
    except BaseException as error:
        kept = len(rundir.read_blocks())
        where = f"Stopped {stage[0]}"
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else (str(error) or type(error).__name__)
        shown = f"{where}: {what}\n{kept} finished blocks are kept in {rundir.path / 'blocks.jsonl'}."
        if isinstance(error, RepruneError):
            raise type(error)(shown if kept else f"{where}: {what}") from error
        log.error(shown, exc_info=not isinstance(error, KeyboardInterrupt))
        raise
