import dataclasses

import pytest
import torch

from reprune.evaluation import Measured, Subject, as_dense, cache_key, measure_dense, measure_pruned, model_id
from reprune.model.tiny import byte_tokenizer


@dataclasses.dataclass(frozen=True)
class Counting:
    """An evaluation that counts how often it is computed."""

    calls: list
    setting: int = 1
    value: float = 1.5
    errors: bool = False

    def identity(self):
        return {}

    def steps(self, subject):
        return 1

    def dense(self, subject, tick):
        self.calls.append(1)
        record = {"errors": {"a task": "it broke"}} if self.errors else {}
        return Measured({"it/x": self.value}, [{"item": 0, "value": 1.0}], record, {"x": torch.arange(3.0)})

    def pruned(self, subject, dense, tick):
        return Measured({"it/x": self.value, "other/x": 1.0})


class Killed(Counting):
    def dense(self, subject, tick):
        raise KeyboardInterrupt


@pytest.fixture
def subject(tiny_model, tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("REPRUNE_CACHE", str(tmp_path))
    return Subject(tiny_model(), byte_tokenizer(), {"text": tokens()})


def key(item, subject, model="m"):
    return cache_key("it", dataclasses.replace(item, calls=[]), subject, model, item.identity())


def test_the_second_run_reads(subject):
    item = Counting([])
    first = measure_dense("it", item, subject, "m")
    item.calls.clear()
    second = measure_dense("it", item, subject, "m")
    assert item.calls == []
    assert (first.metrics, first.items, first.record) == (second.metrics, second.items, second.record)
    assert torch.equal(first.state["x"], second.state["x"])


def test_what_changes_the_key(subject, tokens, monkeypatch):
    item = Counting([])
    keys = {
        key(item, subject),
        key(dataclasses.replace(item, setting=2), subject),
        key(item, subject, model="other"),
        key(item, dataclasses.replace(subject, tokens={"text": tokens(seed=1)})),
    }
    assert key(item, subject) in keys
    monkeypatch.setattr("reprune.evaluation.version", lambda package: "another")
    assert len(keys | {key(item, subject)}) == 5


def test_a_damaged_entry_is_made_again(subject, tmp_path):
    item = Counting([])
    measure_dense("it", item, subject, "m")
    item.calls.clear()
    (state,) = (tmp_path / "dense").rglob("state.safetensors")
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    assert torch.equal(measure_dense("it", item, subject, "m").state["x"], torch.arange(3.0))
    assert len(item.calls) == 1


def test_a_result_with_errors_is_not_kept(subject, tmp_path):
    item = Counting([], errors=True)
    assert measure_dense("it", item, subject, "m").record["errors"] == {"a task": "it broke"}
    assert not [path for path in (tmp_path / "dense").iterdir() if path.is_dir()]


def test_an_evaluation_killed_half_way_leaves_nothing(subject, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measure_dense("it", Killed([]), subject, "m")
    assert not [path for path in (tmp_path / "dense").iterdir() if path.is_dir()]


def test_nan_is_an_error(subject):
    result = measure_pruned("it", Counting([], value=float("nan")), subject, Measured({}))
    assert result.metrics == {"other/x": 1.0}
    assert result.record["errors"] == {"it/x": "it is nan"}


def test_names_of_dense_metrics():
    assert as_dense({"ppl/a": 1.0, "ppl_stderr/a": 2.0}) == {"ppl_dense/a": 1.0, "ppl_dense_stderr/a": 2.0}


def test_a_model_is_hashed_only_if_something_is_evaluated(tiny_model):
    assert model_id({}, tiny_model(), byte_tokenizer()) == ""
    one, same, other = (model_id({"x": 1}, tiny_model(seed=seed), byte_tokenizer()) for seed in (0, 0, 1))
    assert one == same != other
