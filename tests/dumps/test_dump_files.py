"""The walk over what strangers left: everything is read once, and what is refused is told."""

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from distdiag.dumps.files import Limits, Refused, printable, walk
from distdiag.dumps.reading import Dump, LargeFile

MIB = 1 << 20


def seen(*paths, **options):
    """Return contents by path and reasons by path, paths relative to the folder of the first."""
    base = f"{Path(paths[0]).parent}/"
    entries = list(walk(paths, **options))
    found = {e.path.removeprefix(base): e.data for e in entries if isinstance(e, Dump)}
    refused = {e.path.removeprefix(base): e.reason for e in entries if isinstance(e, Refused)}
    assert len(found) + len(refused) >= len({e.path for e in entries})
    assert not any("\n" in str(e) for e in entries if isinstance(e, Refused))
    return found, refused


def tar(members, mode="w"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def tar_that_claims(size):
    """Return an archive of one member whose header says that it is so long."""
    info = tarfile.TarInfo("x.log")
    header = bytearray(info.tobuf(format=tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"0123456789".ljust(512, b"\0")


def zipped(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "job"
    path.mkdir()
    return path


def test_files_of_a_folder_come_in_order_of_their_names(folder):
    (folder / "b").mkdir()
    for name in ("c.txt", "a.txt", "b/d.txt"):
        (folder / name).write_bytes(name.encode())
    found, refused = seen(folder)
    assert list(found) == ["job/a.txt", "job/b/d.txt", "job/c.txt"]
    assert found["job/b/d.txt"] == b"b/d.txt"
    assert refused == {}


def test_a_single_file_may_be_named_and_a_missing_one_is_reported(folder):
    (folder / "a").write_bytes(b"x")
    found, refused = seen(folder / "a", folder / "none")
    assert found == {"a": b"x"}
    assert refused == {"none": "cannot be opened: No such file or directory"}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.zip", zipped({"d/a": b"1", "b": b"2"})),
        ("x.tar", tar({"d/a": b"1", "b": b"2"})),
        ("x.tar.gz", tar({"d/a": b"1", "b": b"2"}, "w:gz")),
        ("named-otherwise", tar({"d/a": b"1", "b": b"2"}, "w:gz")),
    ],
    ids=["zip", "tar", "tar.gz", "tar.gz-named-otherwise"],  # the bytes hold the time
)
def test_archives_are_known_by_their_content(folder, name, data):
    (folder / name).write_bytes(data)
    found, refused = seen(folder)
    assert found == {f"job/{name}!d/a": b"1", f"job/{name}!b": b"2"}
    assert refused == {}


def test_a_packed_file_keeps_its_name(folder):
    (folder / "a.log.gz").write_bytes(gzip.compress(b"hello"))
    assert seen(folder) == ({"job/a.log.gz": b"hello"}, {})


def test_mixtures_are_read_to_the_bottom(folder):
    inner = zipped({"a.log.gz": gzip.compress(b"deep"), "b": b"2"})
    (folder / "x.tgz").write_bytes(tar({"in.zip": inner, "c": b"3"}, "w:gz"))
    assert seen(folder)[0] == {
        "job/x.tgz!in.zip!a.log.gz": b"deep",
        "job/x.tgz!in.zip!b": b"2",
        "job/x.tgz!c": b"3",
    }


def test_archives_in_archives_end_somewhere(folder):
    data = b"x"
    for _ in range(5):
        data = zipped({"in": data})
    (folder / "x.zip").write_bytes(data)
    found, refused = seen(folder)
    assert found == {}
    assert refused == {"job/x.zip!in!in!in": "is an archive more than 3 archives deep"}


def test_links_that_stay_are_passed_over_and_links_that_leave_are_reported(folder):
    (folder / "a").write_bytes(b"x")
    (folder / "here").symlink_to("a")
    (folder / "round").symlink_to(".")
    (folder / "away").symlink_to("/etc/hostname")
    (folder / "up").symlink_to("..")
    (folder / "sibling").symlink_to(f"{folder}-other")
    (folder / "gone").symlink_to("nothing")
    found, refused = seen(folder)
    assert found == {"job/a": b"x"}
    assert set(refused) == {"job/away", "job/up", "job/sibling"}
    assert set(refused.values()) == {"is a link that leaves the folder; name its target to read it"}


def test_a_link_that_the_user_names_is_followed(folder):
    (folder / "a").write_bytes(b"x")
    (folder.parent / "link").symlink_to(folder)
    assert list(seen(folder.parent / "link")[0].values()) == [b"x"]


def test_links_in_archives_are_never_followed(folder):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, kind, target in (
            ("away", tarfile.SYMTYPE, "/etc/hostname"),
            ("up", tarfile.SYMTYPE, "../../secret"),
            ("here", tarfile.SYMTYPE, "a"),
            ("hard", tarfile.LNKTYPE, "a"),
            ("fifo", tarfile.FIFOTYPE, ""),
            ("device", tarfile.CHRTYPE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    (folder / "x.tar").write_bytes(file.getvalue())
    link = zipfile.ZipInfo("away")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(folder / "y.zip", "w") as archive:
        archive.writestr(link, "/etc/hostname")
    reason = "is a link that leaves the archive"
    assert seen(folder) == (
        {},
        {"job/x.tar!away": reason, "job/x.tar!up": reason, "job/y.zip!away": reason},
    )


def test_pipes_and_devices_are_never_opened(folder):
    os.mkfifo(folder / "pipe")
    (folder / "a").write_bytes(b"x")
    assert seen(folder) == ({"job/a": b"x"}, {})
    assert seen(folder / "pipe") == ({}, {"pipe": "is no regular file"})
    assert seen("/dev/zero") == ({}, {"zero": "is no regular file"})


def test_names_cannot_write_to_the_terminal(folder):
    name = "a\x1b[31m\nred\u202e"
    (folder / name).write_bytes(b"1")
    (folder / os.fsdecode(b"\xff")).write_bytes(b"2")
    (folder / "x.tar").write_bytes(tar({name: b"3"}))
    found, _ = seen(folder)
    assert set(found) == {
        "job/a\\x1b[31m\\nred\\u202e",
        "job/\\udcff",
        "job/x.tar!a\\x1b[31m\\nred\\u202e",
    }
    assert printable("plain é 名") == "plain é 名"


def test_a_large_file_is_handed_on_by_its_path(folder):
    (folder / "log").write_bytes(b"a" * MIB + b"end")
    (found,) = walk([folder], limits=Limits(large=MIB))
    assert isinstance(found, LargeFile)
    assert (found.path, found.shown) == (str(folder / "log"), str(folder / "log"))


def test_a_sparse_file_of_many_gigabytes_is_no_burden(folder):
    with open(folder / "weights.bin", "wb") as file:
        file.truncate(1 << 40)
    assert seen(folder) == ({}, {})
    named = folder / "weights.bin"
    assert seen(named) == ({}, {"weights.bin": "is binary and larger than 128 MiB"})


@pytest.mark.parametrize(
    "pack", [gzip.compress, lambda d: zipped({"a": d}), lambda d: tar({"a": d}, "w:gz")]
)
def test_of_a_large_packed_text_the_end_is_read(folder, pack):
    (folder / "x").write_bytes(pack(os.urandom(MIB) + b"end"))
    found, refused = seen(folder, limits=Limits(most_bytes=MIB))
    ((path, data),) = found.items()
    assert len(data) == MIB
    assert data.endswith(b"end")
    assert refused == {path: "is large: only its last 1 MiB are read"}


def test_an_archive_bomb_is_one_line(folder):
    bomb = gzip.compress(bytes(64 * MIB))
    for name, data in {
        "a.gz": bomb,
        "b.zip": zipped({"in": bytes(64 * MIB)}),
        "c.tar.gz": tar({"in": bytes(64 * MIB)}, "w:gz"),
    }.items():
        (folder / name).write_bytes(data)
    (folder / "z").write_bytes(b"after")
    found, refused = seen(folder)
    assert found == {"job/z": b"after"}
    assert set(refused) == {"job/a.gz", "job/b.zip", "job/c.tar.gz"}
    assert all(reason.startswith("looks like an archive bomb") for reason in refused.values())


def test_what_all_archives_unpack_to_is_limited(folder):
    for name in ("a.zip", "b.zip"):
        (folder / name).write_bytes(zipped({str(n): os.urandom(MIB) for n in range(4)}))
    found, refused = seen(folder, limits=Limits(most_unpacked=6 * MIB))
    assert len(found) == 6
    assert refused["job"] == "unpacks to more than 6 MiB; the rest is not read"


def test_the_number_of_files_is_limited(folder):
    for n in range(20):
        (folder / f"{n:02}").write_bytes(b"x")
    (folder / "00.zip").write_bytes(zipped({str(n): b"x" for n in range(20)}))
    found, refused = seen(folder, limits=Limits(most_files=10))
    assert len(found) <= 10
    assert refused["job"] == "holds more than 10 files; the rest is not read"


def test_folders_end_somewhere(folder):
    deep = folder
    for _ in range(40):
        deep = deep / "d"
        deep.mkdir()
    (deep / "a").write_bytes(b"x")
    found, refused = seen(folder)
    assert found == {}
    assert list(refused.values()) == ["is more than 32 folders deep"]


def test_folders_of_others_can_be_left_out(folder):
    for name in ("run", "rest"):
        (folder / name).mkdir()
        (folder / name / "a").write_bytes(b"x")
    found, refused = seen(folder, skip_folder=lambda path: path.name == "run")
    assert (list(found), refused) == (["job/rest/a"], {})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_member_that_claims_to_be_endless_ends_with_the_file(folder, pack):
    (folder / "x.tar").write_bytes(pack(tar_that_claims(1 << 62)))
    _, refused = seen(folder)
    assert "is damaged" in refused["job/x.tar!x.log"]
    assert "ends within a member" in refused["job/x.tar"]
