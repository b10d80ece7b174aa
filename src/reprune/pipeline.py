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
from reprune.corpora import Texts, draw_texts
from reprune.cost import estimate
from reprune.devices import peak_memory_bytes, pick_device
from reprune.draw import Draw
from reprune.errors import RepruneError
from reprune.evaluation import Subject, as_dense, measure_dense, measure_pruned, model_id, write_results
from reprune.interfaces import Generated, Writer
from reprune.model.pretrained import use_bos
from reprune.parts import Part, Use
from reprune.rundir import RunDir, environment
from reprune.terminal import block_header, block_line, duration, log, logging_to, size
from reprune.walk import BlockRecord, Walk, sparsity


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
        texts = draw_texts(plan, Writer(model, tokenizer, use_bos(plan.model.bos, tokenizer), device, plan.seed))
        rundir.write_json("calib.json", texts.manifest())
        corpora, tests = texts.streams, texts.tests

        at("while evaluating the dense model")
        same = model_id(plan.evals, model, tokenizer)
        subjects = {name: Subject(model.to(device), tokenizer, _tokens(tests[name])) for name in plan.evals}
        dense = {name: measure_dense(name, item, subjects[name], same) for name, item in plan.evals.items()}
        metrics = texts.metrics() | {k: v for item in dense.values() for k, v in as_dense(item.metrics).items()}

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
            mask_rows=plan.mask_rows,
            recon_rows=plan.recon_rows,
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
        _say_summary(plan, rundir, metrics, texts)
    return metrics


def _tokens(tests: dict[str, Draw]) -> dict[str, Tensor]:
    return {corpus: drawn.tokens for corpus, drawn in tests.items()}


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
    parts = " + ".join(_describe(plan, part) for part in plan.parts)
    log.info(f"text      {parts}, {plan.seq_len} tokens each; held out: {', '.join(plan.heldout) or 'none'}")
    log.info(
        f"plan      {cost.forwards} block forwards and {cost.trained} training passes (in sequences), "
        f"about {size(cost.peak_bytes)} of memory and {duration(cost.seconds)}"
    )


def _describe(plan: Plan, part: Part) -> str:
    """Say in a few words where a part of calibration comes from and what it is for."""
    use = "" if len(part.use) == len(Use) else f" for {' '.join(use.value for use in part.use)} only"
    by_model = " that the model writes first" if isinstance(plan.corpora[part.corpus], Generated) else ""
    return f"{part.count} {part.corpus}{by_model}{use}"


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


def _say_summary(plan: Plan, rundir: RunDir, metrics: dict[str, float], texts: Texts) -> None:
    for item in plan.evals.values():
        log.info("")
        log.info(item.table(metrics))
    log.info("")
    log.info(
        f"{metrics['sparsity']:.1%} of the weights of the blocks' linears are zero. Walk "
        f"{duration(metrics['walk_seconds'])}, whole run {duration(metrics['seconds'])}, peak memory "
        f"{size(metrics['peak_memory_bytes'])}."
    )
    for note in texts.notes():
        log.warning(f"Note: {note}")
    log.info(f"Results: {rundir.path} (report.html shows them)")


@contextmanager
def _said_where(rundir: RunDir) -> Iterator[Any]:
    """Keep track of what a run is doing, and say it if the run dies."""
    stage = ["while starting"]

    def at(name: str) -> None:
        stage[0] = name

    try:
        yield at
    except BaseException as error:  # Ctrl-C too: every death is told where it was, and goes on
        kept = len(rundir.read_blocks())
        where = f"Stopped {stage[0]}"
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else (str(error) or type(error).__name__)
        shown = f"{where}: {what}\n{kept} finished blocks are kept in {rundir.path / 'blocks.jsonl'}."
        if isinstance(error, RepruneError):
            raise type(error)(shown if kept else f"{where}: {what}") from error
        log.error(shown, exc_info=not isinstance(error, KeyboardInterrupt))
        raise
