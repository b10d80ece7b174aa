"""A model from the hub, from a local folder, or the one that comes with the install.

Weights are read as safetensors only, unless `model.allow_pickle=true`; code from a repository runs only with
`model.trust_remote_code=true`.
"""

import sys
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from reprune.errors import ModelError
from reprune.model.gguf import model_folder

ASSET = "asset:"


class Dtype(Enum):
    """Number format the weights are held in; auto is the checkpoint's own."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Bos(Enum):
    """Whether sequences start with the tokenizer's BOS; auto does what the tokenizer itself does."""

    auto = "auto"
    always = "always"
    never = "never"


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Settings of a checkpoint; each is explained in conf/model/smollm2.yaml."""

    path: str
    revision: str | None
    dtype: Dtype
    device: str
    attn_implementation: str
    bos: Bos
    trust_remote_code: bool
    allow_pickle: bool

    def describe(self) -> str:
        """Name the model in one line."""
        return self.path if self.revision is None else f"{self.path} at {self.revision}"

    def max_positions(self) -> int | None:
        """Return the largest sequence length in tokens, None if the config sets no limit; reads no weights."""
        return getattr(self._config.get_text_config(decoder=True), "max_position_embeddings", None)

    def skeleton(self) -> Any:
        """Return the model without weights, on the meta device, for its shapes; reads no weights."""
        import torch
        from transformers import AutoModelForCausalLM

        dtype = self._config.dtype if self.dtype is Dtype.auto else getattr(torch, self.dtype.value)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self._config, trust_remote_code=self.trust_remote_code)
        return model.to(dtype or torch.float32)

    def load(self) -> tuple[Any, Any]:
        """Load the model in evaluation mode, on the CPU, and its tokenizer.

        Raises:
            ModelError: the files are missing, are pickles, or are no causal language model.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        quiet_without_terminal()
        folder, revision = self._source
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, revision=revision, trust_remote_code=self.trust_remote_code
            )
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                revision=revision,
                dtype=self.dtype.value,
                attn_implementation=self.attn_implementation,
                trust_remote_code=self.trust_remote_code,
                use_safetensors=None if self.allow_pickle else True,
            )
        except (OSError, ValueError, ImportError) as error:
            raise self._failure(error) from error
        return model.eval(), tokenizer

    @cached_property
    def _source(self) -> tuple[str, str | None]:
        """The folder or hub id to load, and its revision; fetches and converts the asset if it is one."""
        if self.path.startswith(ASSET):
            return str(model_folder(self.path.removeprefix(ASSET))), None
        path = Path(self.path).expanduser()
        return (str(path), None) if path.is_dir() else (self.path, self.revision or "main")

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        folder, revision = self._source
        try:
            return AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> ModelError:
        reason = " ".join(str(error).split())[:300]
        return ModelError(
            f"model.path={self.path}: cannot be loaded ({reason}). Give a local folder with config.json and "
            f"*.safetensors, a hub id that this machine can reach, or model=smollm2, which needs no hub."
        )


def quiet_without_terminal() -> None:
    """Turn off the progress bars of transformers where nobody watches them."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def use_bos(bos: Bos, tokenizer: Any) -> bool:
    """Say whether sequences start with BOS: as set, or for auto as the tokenizer does when it encodes a text."""
    if bos is Bos.auto:
        return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return bos is Bos.always
