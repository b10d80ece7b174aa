"""Text from the user's own files: .txt, .jsonl, .jsonl.gz and .parquet.

A document's id is a hash of its text. So the same text twice is one document, and a split does not change when files
are moved or renamed. Files are read as UTF-8, and only a line feed ends a line: other separators of Unicode are part of
a text.
"""

import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprune.errors import ConfigError, CorpusError
from reprune.interfaces import Document

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
SPACE = " \t\r\n"  # what is cut off the ends of a document; str.strip() would also take separators that belong to it
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Local:
    """Settings; each is explained in conf/calib/local.yaml."""

    paths: Any  # str or list of str; Any because OmegaConf has no union of the two
    text_field: str
    chunk_chars: int
    pack: bool

    def __post_init__(self) -> None:
        if not self._entries() or not all(isinstance(entry, str) and entry for entry in self._entries()):
            raise ConfigError(f"calib.paths={self.paths}: must be a file, folder or pattern, or a list of these.")
        if self.chunk_chars < 1:
            raise ConfigError(f"calib.chunk_chars={self.chunk_chars}: must be at least 1; a document has characters.")

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
                raise CorpusError(f"{path}: has no text in it. Take it out of calib.paths, or fill it.")

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
                    f"calib.paths={entry}: {what} (looked in {Path.cwd()}). Give files, folders or "
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
            if path.name.endswith(".txt"):
                yield from self._chunks(_decode(path.read_bytes().removeprefix(BOM), path))
            elif path.name.endswith(".parquet"):
                yield from self._column(path)
            else:
                yield from self._rows(path)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise CorpusError(f"{path}: is cut off or not a gzip file ({error}). Copy it again.") from error
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

    def _rows(self, path: Path) -> Iterator[str]:
        """Read the text field of each line of JSON; blank lines are left out."""
        # Opened as binary: lines then end at "\n" only.
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                text = _decode(line.removeprefix(BOM) if number == 1 else line, path, number).strip(SPACE)
                if text:
                    yield self._field(text, where)

    def _field(self, line: str, where: str) -> str:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where}: not a line of JSON ({error}). Each line must be one JSON object.") from error
        if not isinstance(row, dict):
            raise CorpusError(
                f"{where}: is a {type(row).__name__}, must be a JSON object with a field {self.text_field!r}."
            )
        if self.text_field not in row:
            raise CorpusError(f"{where}: {_no_field(self.text_field, list(row))}")
        text = row[self.text_field]
        if not isinstance(text, str):
            raise CorpusError(f"{where}: field {self.text_field!r} is a {type(text).__name__}, must be text.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CorpusError(
                f"{where}: field {self.text_field!r} holds half a character (a lone surrogate, {text[error.start]!a}), "
                f"which is not text. Leave this line out, or write the character whole."
            ) from error
        return text

    def _column(self, path: Path) -> Iterator[str]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                schema = file.schema_arrow
                if self.text_field not in schema.names:
                    raise CorpusError(f"{path}: {_no_field(self.text_field, schema.names)}")
                kind = schema.field(self.text_field).type
                if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                    raise CorpusError(f"{path}: column {self.text_field!r} is {kind}, must be string.")
                for batch in file.iter_batches(columns=[self.text_field]):
                    yield from (text for text in batch.column(0).to_pylist() if text is not None)
        except pyarrow.ArrowInvalid as error:
            raise CorpusError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]}).") from error


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files of supported kinds in a folder and all below it."""

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error) from error

    for parent, _, names in os.walk(folder, onerror=fail):
        yield from (Path(parent, name) for name in names if name.endswith(SUFFIXES))


def _decode(content: bytes, path: Path, line: int | None = None) -> str:
    """Decode UTF-8; line is the number of the line that content is, None if content is the whole file."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1 if line is None else line
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1)
        raise CorpusError(
            f"{path}:{number}: not UTF-8 (byte {column + 1} of the line is 0x{content[error.start]:02x}). Convert the "
            f"file, as `iconv -f WINDOWS-1252 -t UTF-8` does for one in that encoding."
        ) from error


def _no_field(field: str, there: list[str]) -> str:
    return f"has no field {field!r}; it has {', '.join(there) or 'none'}. Set calib.text_field to one of these."


def _unreadable(path: Path, error: OSError) -> CorpusError:
    return CorpusError(
        f"{path}: cannot be read ({error.strerror or error}). Mend its permissions, or change calib.paths."
    )
