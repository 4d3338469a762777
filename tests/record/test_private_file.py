"""Files that nobody else can read or redirect, and descriptors that are not mistaken for others."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from distdiag.agent.launch import read_launch
from distdiag.events.errors import UsageError
from distdiag.record.event_file import EventWriter, segment_path
from distdiag.record.private_file import (
    KeptDescriptor,
    Mapping,
    create_private,
    make_private_folder,
    open_private,
)
from distdiag.record.run_dir import open_run_dir, write_atomically
from distdiag.record.status_page import StatusPage

IS_ROOT = os.getuid() == 0


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def descriptors() -> set[str]:
    links = Path("/proc/self/fd").iterdir()
    return {os.readlink(link) for link in links if link.is_symlink()}


@pytest.fixture(params=[0, 0o077, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.skipif(not IS_ROOT, reason="the folder of the test itself must stay usable")
def test_a_run_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    run_dir = open_run_dir(tmp_path / "runs" / "a", read_launch({}))
    StatusPage(run_dir.status(0))
    EventWriter(run_dir.folder, 0, on_forget=lambda: None)
    write_atomically(run_dir.verdict, b"")

    folders = [run_dir.root, run_dir.folder, run_dir.folder / "acks"]
    assert [mode_of(folder) for folder in folders] == [0o700] * 3
    files = [path for path in run_dir.root.rglob("*") if path.is_file()]
    assert len(files) == 5
    assert {mode_of(path) for path in files} == {0o600}


def test_a_folder_of_the_user_keeps_its_rights(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine").chmod(0o755)
    run_dir = open_run_dir(tmp_path / "mine", read_launch({}))
    assert mode_of(run_dir.root) == 0o755
    assert mode_of(run_dir.folder) == 0o700


def test_no_link_is_followed_to_a_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "nowhere").symlink_to(tmp_path / "nothing")
    for name in ("link", "nowhere"):
        with pytest.raises(OSError):
            open_private(tmp_path / name)
        with pytest.raises(OSError):
            create_private(tmp_path / name)
        with pytest.raises(OSError):
            StatusPage(tmp_path / name)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


def test_a_link_under_the_name_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".verdict.json.{os.getpid()}").symlink_to(victim)
    write_atomically(tmp_path / "verdict.json", b"{}")
    assert victim.read_text() == "precious"
    assert (tmp_path / "verdict.json").read_text() == "{}"


def test_what_could_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "verdict.json").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "verdict.json", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["verdict.json"]


@pytest.mark.skipif(not IS_ROOT, reason="only root can make what belongs to somebody else")
@pytest.mark.parametrize("name", ["runs", "runs/a"])
def test_what_somebody_else_has_put_in_the_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    victim = tmp_path / "home"
    (victim / "a").mkdir(parents=True)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    if name == "runs/a":
        (shared / "runs").mkdir()
        (shared / "runs").chmod(0o1777)
    link = shared / name
    link.symlink_to(victim if name == "runs" else victim / "a")
    os.lchown(link, 1234, 1234)
    monkeypatch.chdir(shared)

    with pytest.raises(UsageError, match="was put there by another user"):
        open_run_dir(Path("runs/a"), read_launch({}))

    assert list((victim / "a").iterdir()) == []
    os.lchown(link, 0, 0)  # one's own link is a wish
    open_run_dir(Path("runs/a"), read_launch({}))
    assert (victim / "a" / "attempt-0").is_dir()


def test_overwriting_removes_links_and_not_what_they_lead_to(tmp_path: Path) -> None:
    launch = read_launch({})
    root = tmp_path / "run"
    make_private_folder(root)
    (root / "run.json").write_text("another run")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (root / "attempt-3").symlink_to(tmp_path / "kept")
    open_run_dir(root, launch, overwrite=True)
    assert not (root / "attempt-3").is_symlink()
    assert (tmp_path / "kept" / "file").exists()


def test_the_files_of_a_rank_keep_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    page = StatusPage(tmp_path / "page")
    writer = EventWriter(tmp_path, 0, on_forget=lambda: None, segment_bytes=4096)
    for _ in range(100):
        writer.append(b"x" * 100)
    page.beat(1, 2)
    assert segment_path(tmp_path, 0, 1).exists()
    assert descriptors() == before


def test_changing_segments_closes_no_number_of_the_script(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    writer = EventWriter(tmp_path, 0, on_forget=lambda: None, segment_bytes=4096)
    for name in set(os.listdir("/proc/self/fd")) - before:
        os.close(int(name))  # as `os.closerange` would
    files = [(tmp_path / f"mine-{number}").open("w") for number in range(8)]
    for _ in range(100):
        writer.append(b"x" * 100)
    for file in files:
        file.write("mine")
        file.close()  # raises if the number was closed meanwhile


def test_what_is_mapped_reaches_the_file_and_is_let_go(tmp_path: Path) -> None:
    descriptor = create_private(tmp_path / "file")
    os.posix_fallocate(descriptor, 0, 4096)
    mapping = Mapping(descriptor, 4096)
    os.close(descriptor)
    mapping.memory[1:4] = b"abc"
    assert (tmp_path / "file").read_bytes()[:5] == b"\0abc\0"
    memory = mapping.memory
    mapping.close()
    mapping.close()
    with pytest.raises(ValueError, match="released"):
        memory[0] = 1
    with pytest.raises(OSError):
        Mapping(-5, 4096)


def test_a_kept_descriptor_is_far_from_those_of_the_script(tmp_path: Path) -> None:
    kept = KeptDescriptor(open_private(tmp_path / "file"))
    assert kept.number > 256
    assert not os.get_inheritable(kept.number)
    assert kept.is_ours
    kept.close()
    assert not kept.is_ours


def test_a_number_that_the_script_has_taken_is_left_alone(tmp_path: Path) -> None:
    kept = KeptDescriptor(open_private(tmp_path / "file"))
    os.close(kept.number)
    assert not kept.is_ours
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.dup2(other, kept.number)
    assert not kept.is_ours
    kept.close()
    assert os.write(kept.number, b"mine") == 4
    os.close(kept.number)
    os.close(other)
