"""What a model is, by content: the same for the same weights and vocabulary, wherever they came from."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def fingerprint(model: Any, tokenizer: Any) -> str:
    """Hash a model's parameters and its tokenizer's vocabulary.

    The weights in memory are what is hashed, not the file: this takes a second for each gigabyte, and holds for
    models that were made in code, too. Threads share the parameters, as hashing leaves the interpreter free.

    Args:
        model: on the CPU.
        tokenizer: its tokenizer.
    """

    def one(item: tuple[str, Tensor]) -> bytes:
        name, param = item
        content = param.detach().contiguous().view(-1).view(torch.uint8).numpy()
        digest = hashlib.sha256(f"{name} {param.dtype} {tuple(param.shape)} ".encode())
        digest.update(content.data)
        return digest.digest()

    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(one, sorted(model.named_parameters(), key=lambda item: item[0])))
    words = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return hashlib.sha256(b"".join(digests) + hashlib.sha256(words).digest()).hexdigest()
