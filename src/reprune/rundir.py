"""The files of a run directory, written and read back; whoever shows results reads these files and nothing else.

Every file is written whole under a temporary name and renamed, so that a reader never sees half of one. blocks.jsonl
grows by a line a block and is flushed each time, so that a run that dies keeps its blocks. metrics.json is written
last: its presence means that the run finished.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from reprune.errors import RepruneError

PACKAGES = (
    "reprune",
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "numpy",
)


@dataclass(frozen=True)
class RunDir:
    """A run directory.

    Attributes:
        path: the folder; made if it is not there.
    """

    path: Path

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file whole."""
        self.write_text(name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def write_yaml(self, name: str, content: dict[str, Any]) -> None:
        """Write a YAML file whole, keys in their order."""
        self.write_text(name, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))

    def write_text(self, name: str, content: str) -> None:
        """Write a text file whole."""
        self.write_bytes(name, content.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file whole: under a temporary name, then renamed."""
        with explained(self.path / name):
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.tmp")
            try:
                with temporary.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)

    def append_block(self, record: dict[str, Any]) -> None:
        """Add one line to blocks.jsonl and flush it."""
        with explained(self.path / "blocks.jsonl"), (self.path / "blocks.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_json(self, name: str) -> Any:
        """Read a JSON file, None if it is not there."""
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def read_config(self) -> dict[str, Any]:
        """Read config.resolved.yaml."""
        config = yaml.safe_load((self.path / "config.resolved.yaml").read_text(encoding="utf-8"))
        assert isinstance(config, dict)
        return config

    def read_blocks(self) -> list[dict[str, Any]]:
        """Read every finished line of blocks.jsonl."""
        path = self.path / "blocks.jsonl"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]  # what follows the last line end was cut off


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn a full disk or a folder that cannot be written into one clear error; what was written before stays."""
    try:
        yield
    except OSError as error:
        raise RepruneError(
            f"{path}: cannot be written ({error.strerror or error}). Free some space, or give another folder with "
            f"hydra.run.dir=..."
        ) from error


def environment(device: Any) -> dict[str, Any]:
    """Describe where a run happened: versions, git state, device and number formats; no variables, no host names."""
    import torch

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": _git_state(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Return the commit of this package's checkout and whether it has changes, None outside of one."""
    folder = Path(__file__).parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(git("status", "--porcelain"))} if commit else None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
