# ruff: noqa: SIM115 (that files are left open is what is tested)
from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from distdiag.probes.files.open_files import (
    OpenFile,
    OpenFiles,
    descriptor_is_open,
    file_is_open,
    or_mapped,
)


def test_ends_are_reported_once_and_those_of_locks_last() -> None:
    reported: list[str] = []
    is_open = {"lock": True, "a": True, "b": True}
    files = OpenFiles()
    for name in is_open:
        files.add(
            OpenFile(
                lambda name=name: is_open[name],
                lambda name=name: reported.append(name),
                is_lock=name == "lock",
            )
        )

    files.settle()
    assert reported == []
    is_open.update(lock=False, b=False)
    files.settle()
    assert reported == ["b", "lock"]
    assert files
    is_open["a"] = False
    files.settle()
    files.settle()

    assert reported == ["b", "lock", "a"]
    assert not files


def test_what_was_forgotten_has_no_end() -> None:
    files = OpenFiles()
    file = OpenFile(lambda: False, lambda: pytest.fail("told"))
    files.add(file)

    files.remove(file)
    files.remove(file)
    files.settle()


def test_a_file_object_is_open_until_it_is_closed_or_gone(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w", encoding="utf-8") as file:
        is_open = file_is_open(file)
        assert is_open()
    assert not is_open()

    file = open(tmp_path / "a", "w", encoding="utf-8")
    is_open = file_is_open(file)
    file.detach().close()
    assert not is_open()
    del file
    assert not is_open()


def test_a_descriptor_is_not_mistaken_for_another_file(tmp_path: Path) -> None:
    first = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    other = os.open(tmp_path / "b", os.O_RDWR | os.O_CREAT)
    is_open = descriptor_is_open(first)
    assert is_open()

    os.dup2(other, first)
    assert not is_open()
    os.close(first)
    os.close(other)
    assert not is_open()


def test_a_mapping_counts_as_open_until_it_is_closed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    with open(tmp_path / "a", "r+b") as file:
        is_open = or_mapped(file_is_open(file), file.fileno())
        memory = mmap.mmap(file.fileno(), 0)

    assert is_open()
    assert is_open()
    memory.close()
    assert not is_open()
