"""Text from the user's own files: .txt, .jsonl, .jsonl.gz (or .json.gz), .parquet and .arrow.

A document's id is a hash of its text. So the same text twice is one document, and a split does not change when files
are moved or renamed. How files are read is told in reprune.rows.

Errors call a setting by its own name, since a corpus cannot know whether it was named in calib, heldout or eval; who
draws from it says which corpus it is.
"""

import glob
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprune.errors import ConfigError, CorpusError
from reprune.interfaces import Document
from reprune.rows import BOM, SPACE, SUFFIXES, decode, rows


@dataclass(frozen=True, kw_only=True)
class Local:
    """Settings; each is explained in conf/calib/local.yaml."""

    paths: Any  # str or list of str; Any because OmegaConf has no union of the two
    text_field: str
    chunk_chars: int
    pack: bool

    def __post_init__(self) -> None:
        if not self._entries() or not all(isinstance(entry, str) and entry for entry in self._entries()):
            raise ConfigError(f"paths={self.paths}: must be a file, folder or pattern, or a list of these.")
        if self.chunk_chars < 1:
            raise ConfigError(f"chunk_chars={self.chunk_chars}: must be at least 1; a document has characters.")

    def documents(self) -> Iterator[Document]:
        """Yield each distinct text once, under the first 16 digits of its SHA-256, file by file.

        Raises:
            CorpusError: no file is there, one cannot be read, is empty, is not UTF-8, or its rows are not as expected.
        """
        seen = set()
        for path in self.files():
            empty = True
            for text in self._texts(path):
                text = text.strip(SPACE)
                if not text:
                    continue
                empty = False
                key = hashlib.sha256(text.encode()).hexdigest()[:16]
                if key not in seen:
                    seen.add(key)
                    yield Document(key, text)
            if empty:
                raise CorpusError(f"{path}: has no text in it. Take it out of paths, or fill it.")

    def revision(self) -> str:
        """Return a hash of the files' contents, whatever their names and order.

        Raises:
            CorpusError: no file is there, or one cannot be read.
        """
        digests = []
        for path in self.files():
            try:
                with path.open("rb") as file:
                    digests.append(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise _unreadable(path, error) from error
        return f"sha256:{hashlib.sha256(b''.join(sorted(digests))).hexdigest()}"

    def files(self) -> list[Path]:
        """Return the files that `paths` names, each once, in the order of `paths` and within an entry by name.

        Raises:
            CorpusError: an entry names no file, a file of a kind that cannot be read, or a folder that cannot be
                listed.
        """
        found: dict[Path, None] = {}
        for entry in self._entries():
            path = Path(entry).expanduser()
            if path.is_dir():
                matches = sorted(_below(path))
            elif path.exists():
                matches = [path]
            else:
                matches = sorted(
                    match for match in map(Path, glob.glob(str(path), recursive=True)) if not match.is_dir()
                )
            if not matches:
                what = "holds no file of a supported kind" if path.is_dir() else "there is no such file"
                raise CorpusError(
                    f"paths={entry}: {what} (looked in {Path.cwd()}). Give files, folders or "
                    f"patterns of {', '.join(SUFFIXES)}."
                )
            for match in matches:
                if not match.name.endswith(SUFFIXES):
                    raise CorpusError(f"{match}: unknown kind of file. Supported: {', '.join(SUFFIXES)}.")
                found[match] = None
        return list(found)

    def _entries(self) -> list[str]:
        return list(self.paths) if isinstance(self.paths, list | tuple) else [self.paths]

    def _texts(self, path: Path) -> Iterator[str]:
        try:
            with path.open("rb") as file:
                if path.name.endswith(".txt"):
                    yield from self._chunks(decode(file.read().removeprefix(BOM), str(path)))
                else:
                    yield from rows(file, str(path), self.text_field)
        except OSError as error:
            raise _unreadable(path, error) from error

    def _chunks(self, text: str) -> Iterator[str]:
        """Cut a text at blank lines into pieces of at least chunk_chars; a short rest joins the last piece."""
        starts = [0]
        for blank in re.finditer(r"\n[ \t\r]*\n", text):
            enough = blank.start() - starts[-1] >= self.chunk_chars
            if enough and len(text) - blank.end() >= self.chunk_chars:
                starts.append(blank.end())
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            yield text[start:end]


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files of supported kinds in a folder and all below it."""

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error) from error

    for parent, _, names in os.walk(folder, onerror=fail):
        yield from (Path(parent, name) for name in names if name.endswith(SUFFIXES))


def _unreadable(path: Path, error: OSError) -> CorpusError:
    return CorpusError(f"{path}: cannot be read ({error.strerror or error}). Mend its permissions, or change paths.")
