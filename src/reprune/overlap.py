"""Which documents share text: a run of letters and digits that is in both, whatever the spacing and punctuation.

Runs are compared by hash. A passage that comes twice, in two corpora or two files, is found although its ids differ
and although it may be part of a longer document.
Source: after Lee et al., ACL 2022, arXiv:2107.06499, who drop what shares 50 tokens; this is about as long.
"""

from collections.abc import Iterable, Mapping

import numpy as np

RUN = 200  # letters and digits in a row that two documents must share; a shorter document must be in the other whole
BASE = 0x9E3779B97F4A7C15  # odd, so that its powers never vanish modulo 2**64


class Runs:
    """The runs of some documents.

    Args:
        texts: the documents.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.letters = [_letters(text) for text in texts]
        hashes = [_hashes(_codes(letters), RUN) for letters in self.letters]
        self.known = np.unique(np.concatenate([*hashes, np.zeros(1, np.uint64)]))  # sorted, and never empty

    def sharing(self, texts: Mapping[str, str]) -> set[str]:
        """Return the ids of those texts that share a run with these documents."""
        return {id for id, text in texts.items() if self._has(_letters(text))}

    def _has(self, letters: str) -> bool:
        if len(letters) < RUN:
            return bool(letters) and any(letters in known for known in self.letters)
        hashes = _hashes(_codes(letters), RUN)
        places = np.searchsorted(self.known, hashes).clip(max=len(self.known) - 1)
        return bool((self.known[places] == hashes).any())


def _letters(text: str) -> str:
    """Return the letters and digits of a text, in lower case."""
    return "".join(char for char in text.lower() if char.isalnum())


def _codes(letters: str) -> np.ndarray:
    return np.frombuffer(letters.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)


def _hashes(codes: np.ndarray, length: int) -> np.ndarray:
    """Return a hash of every run of a length, in order: its codes as the digits of a number to BASE, modulo 2**64."""
    if len(codes) < length:
        return np.zeros(0, np.uint64)
    if length == 1:
        return codes
    half = length // 2
    first = _hashes(codes, half)
    runs = first[:-half] * np.uint64(pow(BASE, half, 2**64)) + first[half:]
    return runs if length % 2 == 0 else runs[:-1] * np.uint64(BASE) + codes[2 * half :]
