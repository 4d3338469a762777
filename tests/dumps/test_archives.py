"""Damaged archives: what comes before the damage is read, and the damage is one line."""

import gzip
import io
import os
import tarfile
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdiag.dumps.files import Budget, Limits, is_archive, members
from distdiag.events.errors import DamagedFileError
from tests.dumps.test_dump_files import tar, zipped

NOISE = os.urandom(200_000)
SOUND = {
    "zip": zipped({"a": b"1" * 1000, "b": NOISE, "c": b"3"}),
    "tar": tar({"a": b"1" * 1000, "b": NOISE, "c": b"3"}),
    "tar.gz": tar({"a": b"1" * 1000, "b": NOISE, "c": b"3"}, "w:gz"),
    "gz": gzip.compress(NOISE),
}


def unpacked(data):
    """Return sizes and problems by name, and the damage of the whole."""
    found = {}
    try:
        for member in members(io.BytesIO(data), Budget(Limits(most_unpacked=1 << 26))):
            found[member.name] = (len(member.data), member.problem)
    except DamagedFileError as error:
        return found, str(error)
    return found, ""


@pytest.mark.parametrize("kind", SOUND)
def test_sound_archives_have_no_problem(kind):
    found, damage = unpacked(SOUND[kind])
    expected = {"": 200_000} if kind == "gz" else {"a": 1000, "b": 200_000, "c": 1}
    assert (found, damage) == ({name: (size, "") for name, size in expected.items()}, "")
    assert is_archive(SOUND[kind][:512])


def test_of_a_log_that_was_cut_while_it_was_packed_the_beginning_is_read():
    ((size, problem),) = unpacked(SOUND["gz"][:100_000])[0].values()
    assert 50_000 < size < 200_000
    assert problem.startswith("is damaged, and read only so far: ")


def test_of_a_tar_that_was_cut_the_first_members_are_read():
    found, damage = unpacked(SOUND["tar"][:100_000])
    assert found["a"] == (1000, "")
    assert found["b"][1].startswith("is damaged, and read only so far: ")
    assert damage.startswith("is a damaged archive: ") or damage == ""


def test_one_damaged_member_of_a_zip_leaves_the_others():
    data = bytearray(SOUND["zip"])
    data[5000:5010] = b"damaged!!!"
    found, damage = unpacked(bytes(data))
    assert (found["a"], found["c"], damage) == ((1000, ""), (1, ""), "")
    assert "damaged" in found["b"][1]


def test_a_member_that_needs_a_password_is_reported():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", b"x")
    data = bytearray(file.getvalue())
    data[6] |= 1  # the flag in the member's head, and that in the directory
    data[data.index(b"PK\x01\x02") + 8] |= 1
    ((_, problem),) = unpacked(bytes(data))[0].values()
    assert problem.startswith("cannot be unpacked: ")
    assert "encrypted" in problem


@pytest.mark.parametrize(
    ("magic", "packer"), [(b"BZh9", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")]
)
def test_other_packers_are_named(magic, packer):
    data = magic + b"x" * 100
    assert is_archive(data)
    assert unpacked(data) == ({}, f"is packed by {packer}, which is not read: unpack it first")


def test_a_head_that_claims_gigabytes_is_not_believed():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a")
        info.pax_headers = {"comment": "x" * (8 << 20)}
        archive.addfile(info)
    for data in (file.getvalue(), gzip.compress(file.getvalue())):
        found, damage = unpacked(data)
        assert (found, damage) == ({}, "is damaged: the header of a member is too long")


def test_a_sparse_member_is_not_blown_up():
    info = tarfile.TarInfo("a")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 0
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    head[386:398], head[398:410] = b"00000000000\0", b"00000000000\0"
    head[483:495] = b"77777777777\0"
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    found, _ = unpacked(bytes(head) + bytes(1024))
    assert found == {"a": (0, "is a sparse file, which is not unpacked")}


@given(st.sampled_from(sorted(SOUND)), st.data())
def test_whatever_happened_to_an_archive_is_reported_in_one_line(kind, data):
    sound = SOUND[kind]
    damaged = bytearray(sound[: data.draw(st.integers(0, len(sound)))])
    ends = st.one_of(st.integers(0, 600), st.integers(max(0, len(damaged) - 600), len(damaged)))
    for place in data.draw(st.lists(ends, max_size=8)):
        if place < len(damaged):
            damaged[place] = data.draw(st.integers(0, 255))
    if is_archive(bytes(damaged[:512])):
        found, damage = unpacked(bytes(damaged))
        assert all(
            "\n" not in line for line in (damage, *(problem for _, problem in found.values()))
        )


@given(
    st.sampled_from([b"PK\x03\x04", b"PK\x05\x06", b"\x1f\x8b\x08", b"x" * 257 + b"ustar"]),
    st.binary(),
)
def test_noise_that_begins_like_an_archive_is_reported_in_one_line(magic, noise):
    found, damage = unpacked(magic + noise)
    assert "\n" not in damage
    assert damage or found
