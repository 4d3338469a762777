from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from distdiag.probes.files.paths import FilePaths, as_text


@pytest.fixture
def paths(tmp_path: Path) -> FilePaths:
    return FilePaths(str(tmp_path / "own"), "/app/train.py")


def found(paths: FilePaths, written: str) -> str | None:
    place = paths.find(written)
    return None if place is None else place.path


@pytest.mark.parametrize(
    "path",
    [
        "/proc/self/stat",
        "/sys/devices/x",
        "/dev/null",
        "/etc/passwd",
        "/usr/share/zoneinfo/UTC",
        f"{sys.prefix}/lib/x.py",
        f"{sys.base_prefix}/lib/x.py",
        f"{sysconfig.get_path('stdlib')}/os.py",
        "/home/me/env/lib/python3.11/site-packages/torch/x.json",
        "/home/me/src/__pycache__/x.pyc",
        "/tmp/torchinductor_me/ab/cd.py",
        "/home/me/.triton/cache/x",
    ],
)
def test_what_is_not_the_users_has_no_place(paths: FilePaths, path: str) -> None:
    assert found(paths, path) is None


@pytest.mark.parametrize("path", ["/data/x", "/dev/shm/x", f"{tempfile.gettempdir()}/x", "/x"])
def test_what_ranks_may_share_has_a_place(paths: FilePaths, path: str) -> None:
    assert found(paths, path) == path


def test_our_own_files_have_no_place(paths: FilePaths, tmp_path: Path) -> None:
    assert found(paths, f"{tmp_path}/own/rank-0.events") is None
    assert found(paths, f"{tmp_path}/owner") == f"{tmp_path}/owner"


def test_the_folder_of_the_script_is_no_system_folder(tmp_path: Path) -> None:
    paths = FilePaths(str(tmp_path), "/usr/src/app/train.py")

    assert found(paths, "/usr/src/app/data/x") == "/usr/src/app/data/x"
    assert found(paths, "/usr/share/x") is None


def test_links_of_the_folder_are_resolved_and_that_of_the_file_is_not(
    paths: FilePaths, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "latest").symlink_to("epoch-3")

    place = paths.find(f"{tmp_path}/link/../link/latest")

    assert place is not None
    assert place.path == f"{tmp_path}/real/latest"
    assert place.written == f"{tmp_path}/link/../link/latest"


@pytest.mark.parametrize("written", ["real/", "real/.", "./real", "real/../real", "real//"])
def test_spellings_of_a_folder_are_one(
    paths: FilePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    (tmp_path / "real").mkdir()
    monkeypatch.chdir(tmp_path)
    paths.forget_cwd()

    assert found(paths, written) == f"{tmp_path}/real"


def test_a_folder_that_has_become_a_link_is_resolved_anew(paths: FilePaths, tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    written = f"{tmp_path}/data/sub/x"
    assert found(paths, written) == written

    os.rename(tmp_path / "data", tmp_path / "moved")
    (tmp_path / "data").symlink_to("moved")
    paths.forget(f"{tmp_path}/data/other")
    assert found(paths, written) == written  # nothing that concerns it was reported
    paths.forget(f"{tmp_path}/data")

    assert found(paths, written) == f"{tmp_path}/moved/sub/x"


def test_the_table_of_folders_is_bounded(paths: FilePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distdiag.probes.files.paths._MOST_FOLDERS", 3)

    assert [found(paths, f"/data/{n}/x") for n in range(10)] == [f"/data/{n}/x" for n in range(10)]
    assert len(paths._folders) <= 3


def test_a_folder_that_is_gone_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    assert found(FilePaths("/own", None), "/data/x") == "/data/x"
    assert found(FilePaths("/own", None), "x") is not None


@pytest.mark.parametrize("written", ["a\0b/c", "x/" * 4000, "/"])
def test_what_cannot_be_a_file_has_no_place(paths: FilePaths, written: str) -> None:
    assert found(paths, written) is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("a", "a"),
        (b"a\xff", "a\udcff"),
        (Path("a"), "a"),
        (3, None),
        (True, None),
        (None, None),
        (1.5, None),
        ("", None),
        ([], None),
    ],
)
def test_what_counts_as_a_path(given: object, text: str | None) -> None:
    assert as_text(given) == text
