"""Downstream tasks with lm-eval, on the model in memory, and the paired difference between pruned and dense.

Prompts, choices, metrics and aggregation are those of the installed lm-eval. `reprune.eval.rows` says which tasks take
their rows from what comes with the install, so that they need no hub.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reprune.assets import asset
from reprune.config import near
from reprune.errors import ConfigError
from reprune.eval.paired import NOISE, mean_of, paired
from reprune.eval.rows import OFFLINE, PAPER, WHEEL, offline_task
from reprune.evaluation import Measured, Subject
from reprune.terminal import log, table

PRESETS = {"paper": list(PAPER)}


class Source(Enum):
    """Where rows come from: asset, the wheel for tasks that it holds and the hub for others; hub, always the hub."""

    asset = "asset"
    hub = "hub"


@dataclass(frozen=True, kw_only=True)
class ZeroShot:
    """Settings; each is explained in conf/eval/zeroshot.yaml."""

    tasks: Any  # a list of names, or the name of a preset; Any because OmegaConf has no union of the two
    rows: Source
    num_fewshot: int
    fewshot_seed: int
    limit: float | None
    batch_tokens: int
    share_contexts: bool
    chat_template: bool
    include_path: str | None

    def __post_init__(self) -> None:
        names = self.names
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"eval.zeroshot.tasks={self.tasks}: must be a list of lm-eval's tasks or groups, such as "
                f"[piqa,arc_easy], or the preset {' or '.join(PRESETS)}. Leave zeroshot out of eval to score none."
            )
        if len(set(names)) != len(names):
            raise ConfigError(f"eval.zeroshot.tasks={self.tasks}: a task is named twice.")
        if self.num_fewshot < 0:
            raise ConfigError(f"eval.zeroshot.num_fewshot={self.num_fewshot}: must be at least 0.")
        if self.limit is not None and not (0 < self.limit < 1 or (self.limit >= 1 and self.limit == int(self.limit))):
            raise ConfigError(
                f"eval.zeroshot.limit={self.limit:g}: must be a whole number of items, a fraction between 0 and 1, or "
                f"null for all of them."
            )
        if self.batch_tokens < 1:
            raise ConfigError(f"eval.zeroshot.batch_tokens={self.batch_tokens}: must be at least 1.")
        if self.include_path is not None and not Path(self.include_path).expanduser().is_dir():
            raise ConfigError(
                f"eval.zeroshot.include_path={self.include_path}: there is no such folder (looked from {Path.cwd()})."
            )

    @property
    def names(self) -> Any:
        """The tasks and groups to score."""
        return PRESETS.get(self.tasks, [self.tasks]) if isinstance(self.tasks, str) else self.tasks

    @property
    def corpora(self) -> list[str]:
        """No test windows are wanted."""
        return []

    @property
    def windows(self) -> int:
        """No test windows are wanted."""
        return 0

    @property
    def seq_len(self) -> int:
        """The shortest sequence there is: an item that is too long for the model is cut, as lm-eval does."""
        return 2

    def check(self) -> None:
        """Look the tasks up in lm-eval's list, where they are not among those that come with the install.

        Raises:
            ConfigError: lm-eval knows no task, group or tag of that name.
        """
        unknown = [name for name in self.names if not self._offline(name) and name not in self._manager.all_tasks]
        if unknown:
            known = [*OFFLINE, *self._manager.all_tasks]
            raise ConfigError(
                f"eval.zeroshot.tasks={unknown[0]}: lm-eval {version('lm-eval')} has no such task or group."
                f"{near(unknown[0], known)} `lm_eval ls tasks` lists them; set eval.zeroshot.include_path to a "
                f"folder with YAMLs of your own."
            )

    def texts(self) -> dict[str, str]:
        """Return every text field of the items that come with the install; those of other tasks would be fetched."""
        found = {}
        for name in filter(self._offline, self.names):
            with _quiet():
                documents = list(offline_task(name).eval_docs)
            limit = len(documents) if self.limit is None else self.limit
            for number, fields in enumerate(documents[: int(limit if limit >= 1 else limit * len(documents))]):
                found[f"{name}/{number}"] = "\n".join(value for value in fields.values() if isinstance(value, str))
        return found

    def identity(self) -> dict[str, Any] | None:
        """Name the wheel; tasks of the user's own are never cached, as their rows may change unseen."""
        return None if self.include_path else {"rows": WHEEL and asset(WHEEL).name}

    def steps(self, subject: Subject) -> int:
        """Count tasks: how many requests each makes is known only when it is built."""
        return len(self.names)

    def dense(self, subject: Subject, tick: Callable[[], None]) -> Measured:
        """Score every task.

        A task that fails loses only itself: it is in the record with its error, and has no metric.

        Args:
            subject: the model and its tokenizer.
            tick: called after each task or group.

        Returns:
            `<metric>/<task>` and `<metric>_stderr/<task>`, `acc/mean` over the tasks that have an accuracy, a row for
            each item, and a record of versions, counts and errors.
        """
        from lm_eval import evaluate

        found: dict[str, float] = {}
        tasks: dict[str, Any] = {}
        errors: dict[str, str] = {}
        items: list[dict[str, Any]] = []
        for name in self.names:
            try:
                with _quiet():
                    model = self._model(subject)
                    loaded = self._load(name)
                    results = evaluate(
                        model,
                        loaded,
                        limit=self.limit,
                        apply_chat_template=self.chat_template,
                        fewshot_as_multiturn=self.chat_template,
                        bootstrap_iters=1000,
                    )
                metrics, record = _flat(results), _describe(results, self)
                bad = [key for key, value in metrics.items() if math.isnan(value)]
                if bad:
                    raise ValueError(f"{bad[0]} is not a number")
            except Exception as error:  # whatever a task does must not cost the others
                errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
                log.warning(f"eval.zeroshot: {name} failed and is left out: {errors[name]}")
            else:
                found |= metrics
                tasks |= record
                items += [row for task, samples in results["samples"].items() for row in _rows(task, samples)]
            tick()
        found |= _mean(found, tasks)
        record = {
            "lm_eval": version("lm-eval"),
            "num_fewshot": self.num_fewshot,
            "limit": self.limit,
            "chat_template": self.chat_template,
            "tasks": tasks,
            "errors": errors,
        }
        return Measured(found, items, record)

    def pruned(self, subject: Subject, dense: Measured, tick: Callable[[], None]) -> Measured:
        """Score every task and pair each item with the dense model's.

        Returns:
            What `dense` returns, and for each metric that has one value an item `<metric>_delta/<task>` (pruned minus
            dense), the ends of its 95 % interval `_delta_low`, `_delta_high`, and `<metric>_p/<task>`; the same for
            `acc/mean`.
        """
        result = self.dense(subject, tick)
        metrics = dict(result.metrics)
        pairs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        before = {_key(row): row["value"] for row in dense.items}
        for row in result.items:
            if _key(row) in before:
                pairs[row["metric"], row["task"]].append((before[_key(row)], row["value"]))
        differences = {key: paired(*map(list, zip(*values, strict=True))) for key, values in pairs.items()}
        accuracies = [item for (metric, _), item in differences.items() if metric == "acc"]
        if accuracies:
            differences["acc", "mean"] = mean_of(accuracies)
        for (metric, task), item in differences.items():
            metrics |= {
                f"{metric}_delta/{task}": item.delta,
                f"{metric}_delta_low/{task}": item.low,
                f"{metric}_delta_high/{task}": item.high,
                f"{metric}_p/{task}": item.p,
            }
        return Measured(metrics, result.items, result.record)

    def table(self, metrics: dict[str, float]) -> str:
        """Lay out the scores: a row a task and metric, and whether the difference is more than noise."""
        rows = []
        for key in metrics:
            kind, _, task = key.partition("/")
            if not kind.endswith("_delta"):
                continue
            metric = kind.removesuffix("_delta")
            low, high = metrics[f"{kind}_low/{task}"], metrics[f"{kind}_high/{task}"]
            p = metrics[f"{metric}_p/{task}"]
            rows.append([
                task,
                metric,
                _with_error(metrics, f"{metric}_dense", task),
                _with_error(metrics, metric, task),
                f"{metrics[key]:+.3f} [{low:+.3f}, {high:+.3f}]",
                f"{p:.3f}",
                "noise" if p > NOISE else "",
            ])  # fmt: skip
        return table(["task", "metric", "dense", "pruned", "difference [95 %]", "p", ""], rows, left=2)

    def _offline(self, name: str) -> bool:
        return self.rows is Source.asset and name in OFFLINE and self.include_path is None

    @cached_property
    def _manager(self) -> Any:
        """lm-eval's list of all tasks, and of the user's; reading it takes seconds."""
        with _quiet():
            from lm_eval.tasks import TaskManager

            path = None if self.include_path is None else str(Path(self.include_path).expanduser())
            return TaskManager(include_path=path)

    def _load(self, name: str) -> Any:
        """Build a task or the tasks of a group, with their shots set."""
        loaded = {"tasks": {name: offline_task(name)}} if self._offline(name) else self._manager.load([name])
        for task in loaded["tasks"].values():
            # lm-eval's own rule: a task whose YAML says 0 has no use for examples.
            if task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=self.num_fewshot)
            task.set_fewshot_seed(seed=self.fewshot_seed)
        return loaded

    def _model(self, subject: Subject) -> Any:
        from reprune.eval.scorer import Scorer

        return Scorer(subject.model, subject.tokenizer, self.batch_tokens, self.share_contexts, lambda: None)


def _flat(results: dict[str, Any]) -> dict[str, float]:
    """Turn lm-eval's results into `<metric>/<task>` and `<metric>_stderr/<task>`; a filter stands in brackets."""
    flat = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, sieve = key.partition(",")
            if comma and isinstance(value, int | float) and not isinstance(value, bool):
                stem = metric.removesuffix("_stderr")
                name = stem if sieve == "none" else f"{stem}[{sieve}]"
                flat[f"{name}{metric[len(stem) :]}/{task}"] = float(value)
    return flat


def _describe(results: dict[str, Any], item: ZeroShot) -> dict[str, Any]:
    """Say of each task which version of it was scored on what."""
    record = {}
    for task, counts in results["n-samples"].items():
        differs = OFFLINE[task].differs if item._offline(task) else ""
        record[task] = {
            "version": results["versions"].get(task),
            "num_fewshot": results["n-shot"].get(task),
            "items": counts["effective"],
            "items_there": counts["original"],
            "rows": f"{asset(WHEEL).name}, validation" if item._offline(task) else "as lm-eval says",
            "differs": differs,
        }
    return record


def _rows(task: str, samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each item and metric that has one number an item."""
    for sample in samples:
        sieve = "" if sample["filter"] == "none" else f"[{sample['filter']}]"
        for metric in sample["metrics"]:
            value = sample[metric]
            if isinstance(value, bool | int | float) or getattr(value, "ndim", None) == 0:
                yield {
                    "task": task,
                    "metric": f"{metric}{sieve}",
                    "item": sample["doc_id"],
                    "item_sha256": sample["doc_hash"],
                    "value": float(value),
                }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["metric"], row["item"], row["item_sha256"]


def _mean(metrics: dict[str, float], tasks: dict[str, Any]) -> dict[str, float]:
    """Average accuracy over tasks, each with the same weight."""
    names = [task for task in tasks if f"acc/{task}" in metrics]
    if not names:
        return {}
    spread = math.sqrt(sum(metrics.get(f"acc_stderr/{task}", 0.0) ** 2 for task in names)) / len(names)
    return {"acc/mean": sum(metrics[f"acc/{task}"] for task in names) / len(names), "acc_stderr/mean": spread}


def _with_error(metrics: dict[str, float], metric: str, task: str) -> str:
    value = metrics.get(f"{metric}/{task}")
    spread = metrics.get(f"{metric}_stderr/{task}")
    return "" if value is None else f"{value:.3f}" if spread is None else f"{value:.3f} ± {spread:.3f}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's log and bars off the terminal: what matters of them is in the record."""
    import datasets
    import lm_eval.api.model
    import lm_eval.api.task

    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.are_progress_bars_disabled()
    modules: tuple[Any, ...] = (lm_eval.api.model, lm_eval.api.task)
    shown = [module.tqdm for module in modules]
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    for module in modules:
        module.tqdm = lambda rows, *_, **__: rows
    try:
        yield
    finally:
        logger.setLevel(level)
        for module, bar in zip(modules, shown, strict=True):
            module.tqdm = bar
        if not bars:
            datasets.enable_progress_bars()
