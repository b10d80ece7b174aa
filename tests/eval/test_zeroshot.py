import json
import os
from pathlib import Path

import pytest

from reprune.errors import ConfigError
from reprune.eval.zeroshot import Source, ZeroShot
from reprune.evaluation import Subject
from reprune.model.tiny import byte_tokenizer

SHARED = Path(os.environ.get("REPRUNE_SHARED_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{text}"
doc_to_target: label
doc_to_choice: "{{{{[a, b]}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture(scope="session")
def own_tasks(tmp_path_factory):
    """A folder with YAMLs of two tasks, one of which raises when its prompts are made."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"q": f"The river {i % 5} in winter", "a": f" stone {i}", "b": " of the long water", "label": i % 2}
        for i in range(20)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("river", "{{q}}:"), ("broken", "{{q.nothing.there}}")):
        (folder / f"{name}.yaml").write_text(YAML.format(name=name, data=folder / "rows.jsonl", text=text))
    return folder


def zeroshot(folder, **changes):
    settings = {
        "tasks": ["river"], "rows": Source.asset, "num_fewshot": 0, "fewshot_seed": 1234, "limit": None,
        "batch_tokens": 300, "share_contexts": True, "chat_template": False, "include_path": str(folder),
    }  # fmt: skip
    item = ZeroShot(**(settings | changes))
    # Without the 14,000 tasks of the library: reading them takes seconds, and these tests need none.
    from lm_eval.tasks import TaskManager

    item.__dict__["_manager"] = TaskManager(include_path=settings["include_path"], include_defaults=False)
    return item


@pytest.fixture
def subject(tiny_model):
    return Subject(tiny_model(), byte_tokenizer(), {})


def score(item, subject):
    ticks = []
    result = item.dense(subject, lambda: ticks.append(1))
    assert len(ticks) == item.steps(subject)
    return result


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("shots", "limit"), [(0, None), (2, 7)])
def test_scores_equal_those_of_lm_eval(own_tasks, subject, tmp_path, share, shots, limit):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    subject.model.save_pretrained(tmp_path)
    subject.tokenizer.save_pretrained(tmp_path)
    theirs = simple_evaluate(
        "hf", model_args={"pretrained": str(tmp_path)}, tasks=["river"], num_fewshot=shots, limit=limit, batch_size=3,
        device="cpu", task_manager=TaskManager(include_path=str(own_tasks), include_defaults=False),
    )  # fmt: skip
    ours = score(zeroshot(own_tasks, num_fewshot=shots, limit=limit, share_contexts=share), subject)
    for metric in ("acc", "acc_norm"):
        assert ours.metrics[f"{metric}/river"] == theirs["results"]["river"][f"{metric},none"]
        assert ours.metrics[f"{metric}_stderr/river"] == theirs["results"]["river"][f"{metric}_stderr,none"]
        items = [row["value"] for row in ours.items if row["metric"] == metric]
        assert items == [sample[metric] for sample in theirs["samples"]["river"]]
    assert len(items) == (limit or 20)
    assert ours.record["tasks"]["river"]["items"] == (limit or 20)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("batch_tokens", [1, 64, 10_000])
def test_log_likelihoods_equal_those_of_lm_eval(subject, share, batch_tokens):
    from lm_eval.models.huggingface import HFLM

    from reprune.eval.scorer import Scorer

    def of(text):
        return list(text.encode())

    requests = [
        (None, of(context), of(answer))
        for context in ("The river", "A stone", "In winter the water", "x" * 1100)  # the last is too long for the model
        for answer in ("s", " in the long winter", " of")
    ]
    theirs = HFLM(pretrained=subject.model, tokenizer=subject.tokenizer, batch_size=2)._loglikelihood_tokens(requests)
    ticks = []
    scorer = Scorer(subject.model, subject.tokenizer, batch_tokens, share, lambda: ticks.append(1))
    ours = scorer._loglikelihood_tokens(requests)
    assert len(ticks) == len(requests)
    for got, wanted in zip(ours, theirs, strict=True):
        assert got == (pytest.approx(wanted[0], abs=1e-4), wanted[1])


def test_a_task_that_raises_loses_only_itself(own_tasks, subject):
    result = score(zeroshot(own_tasks, tasks=["broken", "river"]), subject)
    assert "acc/river" in result.metrics
    assert not any("broken" in key for key in result.metrics)
    assert result.record["errors"].keys() == {"broken"}
    assert result.metrics["acc/mean"] == result.metrics["acc/river"]


def test_pruned_is_paired_with_dense(own_tasks, subject, tiny_model):
    item = zeroshot(own_tasks)
    dense = score(item, subject)
    same = item.pruned(subject, dense, lambda: None).metrics
    assert (same["acc_delta/river"], same["acc_p/river"]) == (0, 1)
    other = item.pruned(Subject(tiny_model(seed=3), byte_tokenizer(), {}), dense, lambda: None).metrics
    delta = other["acc/river"] - dense.metrics["acc/river"]
    assert other["acc_delta/river"] == pytest.approx(delta)
    assert other["acc_delta_low/river"] <= delta <= other["acc_delta_high/river"]
    assert other["acc_delta/mean"] == pytest.approx(delta)
    table = item.table(other | {"acc_dense/river": dense.metrics["acc/river"]})
    assert "river" in table
    assert "noise" in item.table(same)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": []}, "must be a list of lm-eval's tasks"),
        ({"tasks": ["river", "river"]}, "a task is named twice"),
        ({"num_fewshot": -1}, r"num_fewshot=-1: must be at least 0"),
        ({"limit": 1.5}, r"limit=1\.5: must be a whole number"),
        ({"limit": 0.0}, r"limit=0: must be a whole number"),
        ({"batch_tokens": 0}, "batch_tokens=0: must be at least 1"),
    ],
)
def test_mistakes(own_tasks, changes, message):
    with pytest.raises(ConfigError, match=message):
        zeroshot(own_tasks, **changes)


def test_an_unknown_task_gets_near_names(own_tasks):
    with pytest.raises(ConfigError, match=r"tasks=rivr: lm-eval .* has no such task or group\. Did you mean river"):
        zeroshot(own_tasks, tasks=["rivr"]).check()


def test_the_preset_of_the_paper(tmp_path):
    assert zeroshot(tmp_path, tasks="paper").names[:2] == ["boolq", "rte"]
    assert len(zeroshot(tmp_path, tasks="paper").names) == 7


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data; REPRUNE_SHARED_DATA names its folder")
def test_zero_shot_local(subject, monkeypatch):
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(SHARED.parent)  # its YAMLs say ../shared/data
    item = zeroshot(SHARED / "lm_eval_tasks", tasks=["zero_shot_local"], limit=3)
    item.__dict__["_manager"] = TaskManager(include_path=str(SHARED / "lm_eval_tasks"))
    result = score(item, subject)
    assert result.record["errors"] == {}
    assert {f"acc/{task}" for task in ("boolq", "rte", "winogrande", "arc_easy")} <= result.metrics.keys()
