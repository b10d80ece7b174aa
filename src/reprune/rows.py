"""Texts out of files of rows: lines of text, lines of JSON, Parquet and Arrow, each as it lies there and in order.

Files are read as UTF-8, and only a line feed ends a line: other separators of Unicode are part of a text. A file is
anything that reads bytes and can seek, so that a remote one does too.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from reprune.errors import CorpusError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".json.gz", ".parquet", ".arrow")
SPACE = " \t\r\n"  # what is cut off the ends of a document; str.strip() would also take separators that belong to it
BOM = b"\xef\xbb\xbf"
ARROW_FILE = b"ARROW1"  # what a file in Arrow's file format begins with; the datasets library writes streams


def rows(file: BinaryIO, name: str, text_field: str) -> Iterator[str]:
    """Yield the text of each row; empty ones too, but for lines of JSON that are blank.

    Args:
        file: opened as binary.
        name: of the file: its suffix decides how it is read, and errors name it.
        text_field: field of .jsonl, column of .parquet and .arrow; not used for .txt, where a line is a row.

    Raises:
        CorpusError: the file is cut off, not UTF-8, not of its kind, or its rows have no such text.
    """
    if name.endswith(".txt"):
        for number, line in enumerate(file, start=1):
            yield decode(line.removeprefix(BOM) if number == 1 else line, name, number).removesuffix("\n")
    elif name.endswith(".parquet"):
        yield from _parquet(file, name, text_field)
    elif name.endswith(".arrow"):
        yield from _arrow(file, name, text_field)
    else:
        yield from _json_lines(file, name, text_field)


def decode(content: bytes, name: str, line: int | None = None) -> str:
    """Decode UTF-8; line is the number of the line that content is, None if content is the whole file.

    Raises:
        CorpusError: it is not UTF-8; says where.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1 if line is None else line
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1)
        raise CorpusError(
            f"{name}:{number}: not UTF-8 (byte {column + 1} of the line is 0x{content[error.start]:02x}). Convert the "
            f"file, as `iconv -f WINDOWS-1252 -t UTF-8` does for one in that encoding."
        ) from error


def _json_lines(file: BinaryIO, name: str, text_field: str) -> Iterator[str]:
    lines: Any = gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file  # binary: "\n" alone ends a line
    try:
        for number, line in enumerate(lines, start=1):
            text = decode(line.removeprefix(BOM) if number == 1 else line, name, number).strip(SPACE)
            if text:
                yield _field(text, f"{name}:{number}", text_field)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorpusError(f"{name}: is cut off or not a gzip file ({error}). Copy it again.") from error


def _field(line: str, where: str, text_field: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where}: not a line of JSON ({error}). Each line must be one JSON object.") from error
    if not isinstance(row, dict):
        raise CorpusError(f"{where}: is a {type(row).__name__}, must be a JSON object with a field {text_field!r}.")
    if text_field not in row:
        raise CorpusError(f"{where}: {_no_field(text_field, list(row))}")
    text = row[text_field]
    if not isinstance(text, str):
        raise CorpusError(f"{where}: field {text_field!r} is a {type(text).__name__}, must be text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{where}: field {text_field!r} holds half a character (a lone surrogate, {text[error.start]!a}), "
            f"which is not text. Leave this line out, or write the character whole."
        ) from error
    return text


def _parquet(file: BinaryIO, name: str, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _check_column(table.schema_arrow, name, text_field)
            for group in range(table.num_row_groups):  # one at a time: a batch would reach over many
                for batch in table.iter_batches(columns=[text_field], row_groups=[group]):
                    yield from _column(batch, text_field)
    except pyarrow.ArrowInvalid as error:
        raise CorpusError(f"{name}: cannot be read as parquet ({str(error).splitlines()[0]}).") from error


def _arrow(file: BinaryIO, name: str, text_field: str) -> Iterator[str]:
    import pyarrow

    start = file.read(len(ARROW_FILE))
    file.seek(0)
    try:
        if start == ARROW_FILE:
            table = pyarrow.ipc.open_file(file)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            table = batches = pyarrow.ipc.open_stream(file)
        _check_column(table.schema, name, text_field)
        for batch in batches:
            yield from _column(batch, text_field)
    except (pyarrow.ArrowInvalid, OSError) as error:  # pyarrow calls a file that is cut off an OSError
        raise CorpusError(f"{name}: cannot be read as arrow ({str(error).splitlines()[0]}). Copy it again.") from error


def _check_column(schema: Any, name: str, text_field: str) -> None:
    import pyarrow

    if text_field not in schema.names:
        raise CorpusError(f"{name}: {_no_field(text_field, schema.names)}")
    kind = schema.field(text_field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise CorpusError(f"{name}: column {text_field!r} is {kind}, must be string.")


def _column(batch: Any, text_field: str) -> Iterator[str]:
    yield from (text for text in batch.column(text_field).to_pylist() if text is not None)


def _no_field(field: str, there: list[str]) -> str:
    return f"has no field {field!r}; it has {', '.join(there) or 'none'}. Set text_field to one of these."
