from __future__ import annotations

import glob
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from distdiag.events.files import FileAccess, FileAction, StoreCall
from tests.probes.conftest import Observed


@pytest.fixture(autouse=True)
def _installed(observed: Observed, folder: Path) -> None:
    (folder / "old").mkdir()
    (folder / "old" / "a").write_text("a")
    (folder / "b").write_text("b")
    observed.install("files")


def sync(observed: Observed) -> None:
    observed.recorder.event(StoreCall, action="set", store="s", keys=("k",))


def test_moving_names_both_ends(observed: Observed, folder: Path) -> None:
    os.rename(folder / "b", folder / "c")
    os.replace(folder / "c", folder / "d")
    shutil.move(folder / "d", folder / "e")
    (folder / "e").rename(folder / "f")

    moves = [
        (Path(access.origin).name, Path(access.path).name, access.api)
        for access in observed.accesses(folder)
        if access.action is FileAction.RENAME
    ]
    assert moves == [
        ("b", "c", "os.rename"),
        ("c", "d", "os.replace"),
        ("d", "e", "os.rename"),
        ("e", "f", "os.rename"),
    ]


def test_a_rename_tells_what_is_put_in_place(observed: Observed, folder: Path) -> None:
    (folder / "same").write_text("b")
    (folder / "other").write_text("c")

    for name in ("b", "same", "other", "old"):
        os.replace(folder / name, folder / f"{name}.there")

    first, second, third, tree = [access.moved for access in observed.accesses(folder)[-4:]]
    assert first == second != third
    assert third is not None
    assert tree is None
    assert (folder / "same.there").read_text() == "b"


def test_removing(observed: Observed, folder: Path) -> None:
    os.remove(folder / "b")
    (folder / "old" / "a").unlink()
    os.rmdir(folder / "old")

    assert observed.said(folder) == [("remove", "b"), ("remove", "old/a"), ("remove-tree", "old")]


def test_removing_a_tree_is_one_access(observed: Observed, folder: Path) -> None:
    shutil.rmtree(folder / "old")

    assert observed.said(folder) == [("remove-tree", "old")]
    assert observed.accesses(folder)[0].api == "shutil.rmtree"
    assert not (folder / "old").exists()


def test_making_folders(observed: Observed, folder: Path) -> None:
    os.makedirs(folder / "x" / "y")
    (folder / "z").mkdir()

    made = [name for action, name in observed.said(folder) if action == "make-dir"]
    assert made == ["x", "x/y", "z"]


def test_a_folder_that_was_there_is_said_to_have_been(observed: Observed, folder: Path) -> None:
    for _ in range(3):
        os.makedirs(folder / "old", exist_ok=True)

    made = [a for a in observed.accesses(folder) if a.action is FileAction.MAKE_DIR]
    assert len(made) == 1
    end = observed.end(made[0])
    assert end is not None
    assert end.error.startswith("FileExistsError")


def test_links_name_what_they_lead_to(observed: Observed, folder: Path) -> None:
    os.link(folder / "b", folder / "hard")
    os.symlink("b", folder / "soft")

    links = [(Path(a.path).name, a.origin) for a in observed.accesses(folder)]
    assert links == [("hard", f"{folder}/b"), ("soft", f"{folder}/b")]


def test_listing(observed: Observed, folder: Path) -> None:
    os.listdir(folder / "old")
    list(os.scandir(folder / "old"))
    glob.glob(f"{folder}/old/*")
    list((folder / "old").iterdir())
    list(os.walk(folder / "old"))

    listed = {(a.action, a.path) for a in observed.accesses(folder)}
    assert listed == {(FileAction.LIST, f"{folder}/old")}


def test_a_folder_is_listed_again_when_it_has_changed(observed: Observed, folder: Path) -> None:
    def look() -> None:
        os.listdir(folder / "old")

    look()
    look()
    os.utime(folder / "old", ns=(0, 12345))
    look()

    assert observed.said(folder) == [("list", "old")] * 2


def test_the_current_folder_may_change(
    observed: Observed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    os.listdir()
    open("b").close()
    os.chdir("old")
    open("a").close()
    open("../b").close()

    accesses = observed.accesses(folder)
    assert [(a.path, a.written) for a in accesses] == [
        (f"{folder}/b", "b"),
        (f"{folder}/old/a", "a"),
        (f"{folder}/b", "../b"),
    ]


def test_a_name_below_a_descriptor_is_no_access(observed: Observed, folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.close(os.open("b", os.O_RDONLY, dir_fd=descriptor))
    os.rename("b", "c", src_dir_fd=descriptor, dst_dir_fd=descriptor)
    os.unlink("c", dir_fd=descriptor)
    os.listdir(descriptor)
    os.close(descriptor)

    assert observed.said(folder) == []


def test_a_truncation_is_a_write(observed: Observed, folder: Path) -> None:
    os.truncate(folder / "b", 0)

    assert observed.said(folder) == [("write", "b")]


def test_a_data_base_is_read(observed: Observed, folder: Path) -> None:
    sqlite3.connect(folder / "data.db").close()
    sqlite3.connect(":memory:").close()
    sqlite3.connect(f"file:{folder}/data.db?mode=ro", uri=True).close()

    reads = [a for a in observed.events(FileAccess) if a.api == "sqlite3.connect"]
    assert [(a.action, a.path) for a in reads] == [(FileAction.READ, f"{folder}/data.db")]


def test_the_way_to_a_folder_that_became_a_link_is_found_anew(
    observed: Observed, folder: Path
) -> None:
    os.symlink(folder / "old", folder / "latest")
    open(folder / "latest" / "a").close()
    (folder / "new").mkdir()
    (folder / "new" / "a").write_text("n")
    os.remove(folder / "latest")
    os.symlink(folder / "new", folder / "latest")
    open(folder / "latest" / "a").close()

    reads = [a.path for a in observed.accesses(folder) if a.action is FileAction.READ]
    assert reads == [f"{folder}/old/a", f"{folder}/new/a"]


def test_errors_are_those_of_the_functions(observed: Observed, folder: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        os.remove(folder / "none")
    assert caught.value.filename == str(folder / "none") or caught.value.filename == folder / "none"
    with pytest.raises(TypeError):
        os.rename(folder / "b")
    with pytest.raises(TypeError):
        os.mkdir(None)

    (access,) = observed.accesses(folder)
    end = observed.end(access)
    assert end is not None
    assert end.error.startswith("FileNotFoundError")
