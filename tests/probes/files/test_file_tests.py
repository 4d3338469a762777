from __future__ import annotations

import os
import pickle
from os.path import exists
from pathlib import Path

import pytest

from distdiag.events.files import FileAction, StoreCall
from tests.probes.conftest import Observed

NAMES = [
    "os.path.exists",
    "os.path.isfile",
    "os.path.getsize",
    "os.path.getmtime",
    "os.path.lexists",
    "os.access",
    "Path.exists",
    "Path.is_file",
]


@pytest.fixture(autouse=True)
def _installed(observed: Observed) -> None:
    observed.install("files")


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_to_a_question_is_written_once(
    name: str, is_there: bool, observed: Observed, folder: Path
) -> None:
    owner, _, method = name.rpartition(".")
    ask = getattr({"os": os, "os.path": os.path, "Path": Path}[owner], method)
    arguments = (os.R_OK,) if name == "os.access" else ()
    path = folder / "a"
    if is_there:
        os.mknod(path)

    try:
        ask(path, *arguments)
    except FileNotFoundError:
        assert not is_there

    (test,) = observed.accesses(folder)
    assert (test.action, test.api, test.found) == (FileAction.TEST, name, is_there)


def test_a_folder_is_asked_for(observed: Observed, folder: Path) -> None:
    os.mkdir(folder / "sub")
    assert os.path.isdir(folder / "sub")
    assert (folder / "sub").is_dir()

    assert [a.found for a in observed.accesses(folder)[1:]] == [True, True]


def test_a_name_that_was_imported_before_is_seen_too(observed: Observed, folder: Path) -> None:
    exists(folder / "a")

    assert observed.said(folder) == [("test", "a")]


def test_waiting_for_a_file_shows_only_that_it_came(observed: Observed, folder: Path) -> None:
    def poll() -> bool:
        return os.path.exists(folder / "a")

    assert [poll(), poll(), poll()] == [False] * 3
    os.mknod(folder / "a")
    assert [poll(), poll()] == [True] * 2

    assert [a.found for a in observed.accesses(folder)] == [False, True]


def test_after_an_event_that_orders_the_question_is_a_new_one(
    observed: Observed, folder: Path
) -> None:
    for _ in range(2):
        os.path.exists(folder / "a")
        observed.recorder.event(StoreCall, action="set", store="s", keys=("k",))

    assert len(observed.accesses(folder)) == 2


def test_nothing_changes_for_the_program(folder: Path) -> None:
    assert pickle.loads(pickle.dumps(os.path.exists)) is os.path.exists
    assert os.path.exists.__name__ == "exists"
    assert os.stat in os.supports_fd
    assert type(os.stat).__name__ == "builtin_function_or_method"
    assert os.path.exists("a\0b") is False
    with pytest.raises(TypeError):
        os.path.getsize()
    assert os.path.exists(0)
