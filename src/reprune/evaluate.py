"""Evaluate a checkpoint, dense or pruned, without pruning: `python -m reprune.evaluate model.path=... eval=[ppl]`.

Takes the same settings as run.py, of which only model, eval, the corpora and seed matter, and writes the same files but
for those that a walk makes. Metrics have the names of a pruned model's: `ppl/wiki`, `acc/piqa`.
"""

import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from reprune import cli
from reprune.config import Plan, build_plan
from reprune.errors import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"


def evaluate(plan: Plan, path: Path) -> dict[str, float]:
    """Measure the model of a plan as it is.

    Args:
        plan: checked settings and built parts.
        path: the run directory.

    Returns:
        The numbers, as in metrics.json; empty if the plan says dry_run.

    Raises:
        ConfigError: there is nothing to evaluate by.
    """
    import torch

    from reprune.devices import peak_memory_bytes, pick_device
    from reprune.draw import Split, draw, manifest
    from reprune.evaluation import Subject, measure_dense, model_id, write_results
    from reprune.model.pretrained import use_bos
    from reprune.rundir import RunDir, environment
    from reprune.terminal import duration, log, logging_to, table

    if not plan.evals:
        raise ConfigError("eval=[]: there is nothing to evaluate by. Name some, such as eval=[ppl,zeroshot].")
    rundir = RunDir(path)
    with logging_to(path / "run.log"):
        begin = time.perf_counter()
        device = pick_device(plan.model.device)
        torch.use_deterministic_algorithms(True, warn_only=True)
        rundir.write_yaml("config.resolved.yaml", plan.resolved)
        rundir.write_json("environment.json", environment(device))
        plan.check_length()
        for item in plan.evals.values():
            item.check()
        log.info(f"model     {plan.model.describe()} on {device}")
        if plan.dry_run:
            return {}

        model, tokenizer = plan.model.load()
        same = model_id(plan.evals, model, tokenizer)
        model.to(device)
        bos = use_bos(plan.model.bos, tokenizer)
        found, drawn = {}, {}
        for name, item in plan.evals.items():
            drawn[name] = {
                corpus: draw(
                    plan.corpora[corpus], Split.test, tokenizer, item.windows, item.seq_len, plan.seed, bos,
                    name=corpus, key=f"eval.{name}",
                )
                for corpus in item.corpora
            }  # fmt: skip
            tokens = {corpus: windows.tokens for corpus, windows in drawn[name].items()}
            found[name] = measure_dense(name, item, Subject(model, tokenizer, tokens), same)
        rundir.write_json(
            "calib.json",
            {"eval": {name: {corpus: manifest(item) for corpus, item in each.items()} for name, each in drawn.items()}},
        )
        write_results(rundir, {name: {"model": result} for name, result in found.items()})
        metrics = {key: value for result in found.values() for key, value in result.metrics.items()}
        log.info("")
        log.info(table(["metric", "value", "stderr"], [
            [key, f"{value:.4f}", f"{metrics[spread]:.4f}" if (spread := _stderr_of(key)) in metrics else ""]
            for key, value in metrics.items()
            if "_stderr/" not in key
        ]))  # fmt: skip
        metrics |= {"seconds": time.perf_counter() - begin, "peak_memory_bytes": peak_memory_bytes(device)}
        rundir.write_json("metrics.json", metrics)
        log.info("")
        log.info(f"{duration(metrics['seconds'])}. Results: {rundir.path}")
    return metrics


def _stderr_of(key: str) -> str:
    kind, _, rest = key.partition("/")
    return f"{kind}_stderr/{rest}"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(config: DictConfig) -> None:
    """Check the config, then evaluate into Hydra's output directory."""
    plan = build_plan(config, cli.load_option)
    evaluate(plan, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    cli.guard(main, CONF)
