from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from distdiag.probes.files import log as file_contents
from distdiag.probes.files.log import BLOCK, LARGEST_CONTENT, content_of, digest_of


def test_a_small_file_is_reported_by_its_size_and_its_blocks(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20
    (tmp_path / "a").write_bytes(data)

    content = content_of(str(tmp_path / "a"))

    assert content is not None
    assert content.size == len(data)
    assert content.blocks == (zlib.crc32(data[:BLOCK]), zlib.crc32(data[BLOCK:]))


def test_what_is_large_or_no_file_has_no_content(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(LARGEST_CONTENT + 1))
    os.mkfifo(tmp_path / "pipe")

    for name in ("large", "pipe", "none", "."):
        assert content_of(str(tmp_path / name)) is None


def test_the_largest_content_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(LARGEST_CONTENT))

    content = content_of(str(tmp_path / "a"))

    assert content is not None
    assert len(content.blocks) == LARGEST_CONTENT // BLOCK


@pytest.mark.parametrize(
    ("mine", "theirs", "is_same"),
    [(b"a", b"a", True), (b"a", b"b", False), (b"a", b"ab", False), (b"", b"", True)],
)
def test_digests_compare_files(tmp_path: Path, mine: bytes, theirs: bytes, is_same: bool) -> None:
    (tmp_path / "mine").write_bytes(mine)
    (tmp_path / "theirs").write_bytes(theirs)

    digests = [digest_of(str(tmp_path / name)) for name in ("mine", "theirs")]

    assert None not in digests
    assert (digests[0] == digests[1]) is is_same


def test_what_is_large_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_contents, "LARGEST_MOVED", 3)
    (tmp_path / "a").write_bytes(b"1234")

    assert digest_of(str(tmp_path / "a")) is None


def test_what_is_no_file_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")

    for name in ("none", "pipe", ".", "link"):
        assert digest_of(str(tmp_path / name)) is None
