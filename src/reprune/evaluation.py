"""What an evaluation is given and what it returns, the cache of dense results, and how results are written down.

An evaluation measures a model twice: the dense one, whose results are cached and shared by every run on the same
model, text and settings, and the pruned one, which is compared with what was kept of the dense one.
"""

import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from reprune.assets import build_once, cache_dir
from reprune.model.fingerprint import fingerprint
from reprune.rundir import RunDir
from reprune.terminal import log, progress

VERSIONS = ("reprune", "torch", "transformers", "tokenizers", "datasets", "lm-eval")  # what may change a number
MAX_STATE_BYTES = 2**30  # a dense result that keeps more than this is not cached: reading it would save little
RESULT, STATE = "result.json", "state.safetensors"


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        model: causal language model in evaluation mode, on its device.
        tokenizer: its tokenizer.
        tokens: corpus -> (windows, seq_len) int64, the test windows that were drawn for this evaluation.
    """

    model: Any
    tokenizer: Any
    tokens: dict[str, Tensor]


@dataclass(frozen=True)
class Measured:
    """What an evaluation found.

    Attributes:
        metrics: flat name -> number, such as `ppl/wiki`, `ppl_stderr/wiki`.
        items: one row a task, item and metric, for tests that pair two models; empty if there are no items.
        record: what else is worth keeping, ready for JSON; `errors` in it maps what failed to why.
        state: tensors of the dense model that comparing a pruned one with it needs.
    """

    metrics: dict[str, float]
    items: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


class Evaluation(Protocol):
    """One option of the config group eval. A dataclass: its fields are the settings that the cache goes by."""

    @property
    def corpora(self) -> list[str]:
        """Corpora whose test split it wants windows of, `windows` of `seq_len` tokens; empty for none."""

    def check(self) -> None:
        """Refuse what can be known to fail, before weights are loaded."""

    def texts(self) -> dict[str, str]:
        """Return by id the texts that it scores beside windows of corpora, to look for calibration text in them."""

    def identity(self) -> dict[str, Any] | None:
        """Return what the results depend on beside settings, text, model and versions; None: never cache them."""

    def steps(self, subject: Subject) -> int:
        """Count the ticks of one measurement."""

    def dense(self, subject: Subject, tick: Callable[[], None]) -> Measured:
        """Measure a model by itself."""

    def pruned(self, subject: Subject, dense: Measured, tick: Callable[[], None]) -> Measured:
        """Measure a model and compare it with the dense one."""

    def table(self, metrics: dict[str, float]) -> str:
        """Lay out the metrics of a run for people."""


def measure_dense(name: str, item: Evaluation, subject: Subject, model_id: str) -> Measured:
    """Measure a model by itself, or read the result of an earlier run with the same model, text, settings and versions.

    Args:
        name: of the evaluation.
        item: the evaluation.
        subject: the dense model.
        model_id: its fingerprint.

    Raises:
        AssetError: the cache cannot be written.
        NumericalError: what the evaluation refuses.
    """

    def compute() -> Measured:
        with progress(f"dense model, {name}", item.steps(subject)) as tick:
            return _finite(item.dense(subject, tick))

    identity = item.identity()
    if identity is None:
        return compute()
    key = cache_key(name, item, subject, model_id, identity)
    folder = cache_dir() / "dense" / key
    try:
        build_once(folder, lambda place: _write(compute(), place), _damage)
    except _Uncacheable as kept:
        return kept.measured
    return _read(folder)


def measure_pruned(name: str, item: Evaluation, subject: Subject, dense: Measured) -> Measured:
    """Measure a model and compare it with the dense one; a metric that is NaN becomes an error in the record."""
    with progress(f"pruned model, {name}", item.steps(subject)) as tick:
        return _finite(item.pruned(subject, dense, tick))


def model_id(evals: dict[str, Any], model: Any, tokenizer: Any) -> str:
    """Return the model's fingerprint if an evaluation may be cached; hashing takes a second a gigabyte."""
    return fingerprint(model, tokenizer) if evals else ""


def cache_key(name: str, item: Any, subject: Subject, model_id: str, identity: dict[str, Any]) -> str:
    """Name a dense result by everything that its numbers depend on."""
    device = subject.model.device
    content = {
        "evaluation": name,
        "class": type(item).__qualname__,
        "settings": dataclasses.asdict(item),
        "identity": identity,
        "model": model_id,
        # The same weights in another order of computing give other last bits.
        "attention": getattr(subject.model.config, "_attn_implementation", None),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "tokens": {
            corpus: hashlib.sha256(drawn.numpy().tobytes()).hexdigest() for corpus, drawn in subject.tokens.items()
        },
        "versions": {package: version(package) for package in VERSIONS},
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    return f"{name}-{digest[:32]}"


def as_dense(metrics: dict[str, float]) -> dict[str, float]:
    """Rename the metrics of the dense model for a run's list: `ppl_stderr/wiki` becomes `ppl_dense_stderr/wiki`."""
    renamed = {}
    for key, value in metrics.items():
        kind, slash, rest = key.partition("/")
        stem = kind.removesuffix("_stderr")
        renamed[f"{stem}_dense{kind[len(stem) :]}{slash}{rest}"] = value
    return renamed


def write_results(rundir: RunDir, results: dict[str, dict[str, Measured]]) -> None:
    """Write eval.json and eval_items.parquet.

    Args:
        rundir: the run directory.
        results: evaluation -> `dense`, `pruned` or `model` -> what was found.
    """
    rundir.write_json(
        "eval.json",
        {name: {which: result.record for which, result in each.items()} for name, each in results.items()},
    )
    rows = [
        {"evaluation": name, "model": which, **row}
        for name, each in results.items()
        for which, result in each.items()
        for row in result.items
    ]
    if rows:
        import pyarrow
        import pyarrow.parquet

        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), content)
        rundir.write_bytes("eval_items.parquet", content.getvalue())
    for name, each in results.items():
        for which, result in each.items():
            for what, why in result.record.get("errors", {}).items():
                log.error(f"eval.{name}, {which} model: {what} has no result: {why}")


class _Uncacheable(Exception):
    """Carries a result past the cache: a part of it failed, and may not fail next time, or it is too large."""

    def __init__(self, measured: Measured) -> None:
        super().__init__("not cached")
        self.measured = measured


def _finite(result: Measured) -> Measured:
    """Turn metrics that are NaN into errors of the record."""
    bad = {key: f"it is {value}" for key, value in result.metrics.items() if math.isnan(value)}
    if not bad:
        return result
    errors = result.record.get("errors", {}) | bad
    metrics = {key: value for key, value in result.metrics.items() if key not in bad}
    return dataclasses.replace(result, metrics=metrics, record=result.record | {"errors": errors})


def _write(result: Measured, folder: Path) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in result.state.values())
    if result.record.get("errors") or size > MAX_STATE_BYTES:
        raise _Uncacheable(result)
    content = safetensors.torch.save({key: value.contiguous() for key, value in result.state.items()})
    (folder / STATE).write_bytes(content)
    body = {"metrics": result.metrics, "items": result.items, "record": result.record}
    text = json.dumps(body)
    hashes = {"state": hashlib.sha256(content).hexdigest(), "body": hashlib.sha256(text.encode()).hexdigest()}
    (folder / RESULT).write_text(json.dumps({"sha256": hashes, "body": text}), encoding="utf-8")


def _damage(folder: Path) -> str | None:
    """Say what is wrong with a cached result, None if nothing."""
    try:
        stored = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        hashes = stored["sha256"]
        if hashlib.sha256(stored["body"].encode()).hexdigest() != hashes["body"]:
            return f"{RESULT} is not what was written"
        with (folder / STATE).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != hashes["state"]:
                return f"{STATE} is not what was written"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "a file of it is missing or cut off"
    return None


def _read(folder: Path) -> Measured:
    body = json.loads(json.loads((folder / RESULT).read_text(encoding="utf-8"))["body"])
    return Measured(**body, state=safetensors.torch.load_file(folder / STATE))
