from __future__ import annotations

import inspect
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn
from torch.distributed import checkpoint

from distdiag.events.files import FileAction, StoreCall
from distdiag.probes.files.libraries import LIBRARIES
from tests.probes.conftest import Observed

TENSORS = {"a": torch.ones(3)}


@pytest.fixture(autouse=True)
def _installed(observed: Observed) -> None:
    observed.install("files")


def _script(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "x")


def _memmap(path: Path) -> None:
    np.memmap(path, dtype="f4", mode="w+", shape=3)[0] = 1


WRITERS: dict[str, Callable[[Path], Any]] = {
    "torch.save": lambda path: torch.save(TENSORS, path),
    "torch.jit.save": _script,
    "safetensors.save_file": lambda path: safetensors.torch.save_file(TENSORS, path),
    "safetensors.numpy": lambda path: safetensors.numpy.save_file({"a": np.ones(3)}, path),
    "safetensors.save_model": lambda path: safetensors.torch.save_model(nn.Linear(2, 2), path),
    "numpy.savez": lambda path: np.savez(path, a=np.ones(3)),
    "numpy.memmap": _memmap,
    "zipfile": _zip,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("name", WRITERS)
def test_what_a_library_writes_is_one_write_with_an_end(
    name: str, observed: Observed, folder: Path
) -> None:
    path = folder / "file.npz"

    WRITERS[name](path)
    observed.recorder.event(StoreCall, action="set", store="s", keys=("k",))

    writes = [a for a in observed.accesses(folder) if a.action is not FileAction.TEST]
    assert [write.action for write in writes] == [FileAction.WRITE]
    assert writes[0].has_end
    assert writes[0].site.location is not None
    assert writes[0].site.location.file == __file__
    end = observed.end(writes[0])
    assert end is not None
    assert end.content is not None
    assert end.content.size == path.stat().st_size


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "torch.load": ("torch.save", torch.load),
    "torch.load, mapped": ("torch.save", lambda path: torch.load(path, mmap=True)),
    "torch.jit.load": ("torch.jit.save", lambda path: torch.jit.load(path)),
    "safetensors.load_file": ("safetensors.save_file", safetensors.torch.load_file),
    "safetensors.numpy": ("safetensors.save_file", safetensors.numpy.load_file),
    "safe_open": (
        "safetensors.save_file",
        lambda path: safetensors.safe_open(path, framework="pt").keys(),
    ),
    "numpy.load": ("numpy.savez", np.load),
    "zipfile": ("zipfile", lambda path: zipfile.ZipFile(path).close()),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("name", READERS)
def test_what_a_library_reads_is_a_read(name: str, observed: Observed, folder: Path) -> None:
    writer, read = READERS[name]
    path = folder / "file.npz"
    WRITERS[writer](path)
    before = len(observed.accesses(folder))

    read(path)

    after = observed.accesses(folder)[before:]
    assert {a.action for a in after if a.action is not FileAction.TEST} == {FileAction.READ}
    reads = [a for a in after if a.action is FileAction.READ]
    assert reads[0].site.location is not None
    assert reads[0].site.location.file == __file__


def test_a_write_that_failed_says_why(observed: Observed, folder: Path) -> None:
    with pytest.raises(RuntimeError):
        torch.save(TENSORS, folder / "none" / "a.pt")

    (write,) = observed.accesses(folder)
    end = observed.end(write)
    assert end is not None
    assert end.error.startswith("RuntimeError: ")


def test_a_save_into_an_open_file_is_the_write_of_that_file(
    observed: Observed, folder: Path
) -> None:
    with open(folder / "a.pt", "wb") as file:
        torch.save(TENSORS, file)

    assert [(a.action, a.api) for a in observed.accesses(folder)] == [("write", "open")]


def test_archives_are_unpacked_file_by_file(observed: Observed, folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as archive:
        archive.add(__file__, "x")
    with tarfile.open(folder / "a.tar") as archive:
        archive.extractall(folder / "out", filter="data")

    assert ("write", "out/x") in observed.said(folder)
    assert ("read", "a.tar") in observed.said(folder)


def test_a_distributed_checkpoint_is_written_by_its_files(
    observed: Observed, folder: Path, lone_group: None
) -> None:
    checkpoint.save(dict(TENSORS), checkpoint_id=folder / "ck")
    checkpoint.load(dict(TENSORS), checkpoint_id=folder / "ck")

    accesses = [a for a in observed.accesses(folder) if a.action is not FileAction.TEST]
    said = [(a.action.value, Path(a.path).name) for a in accesses]
    assert ("write", "__0_0.distcp") in said
    assert ("rename", ".metadata") in said
    assert ("read", ".metadata") in said
    assert all(a.site.location and a.site.location.file == __file__ for a in accesses)


def test_a_checkpoint_that_threads_write_shows_who_asked_for_it(
    observed: Observed, folder: Path, lone_group: None
) -> None:
    checkpoint.async_save(dict(TENSORS), checkpoint_id=folder / "ck").result()

    (write,) = [a for a in observed.accesses(folder) if a.path.endswith(".distcp")]
    assert write.thread != "MainThread"
    assert write.site.location is not None
    assert write.site.location.file == __file__


def test_functions_are_as_before(observed: Observed) -> None:
    assert torch.save.__name__ == "save"
    assert "pickle_protocol" in inspect.signature(torch.save).parameters
    ours = safetensors.safe_open
    assert safetensors.torch.safe_open is ours

    observed.uninstall()

    assert safetensors.safe_open is not ours
    assert safetensors.torch.serialize_file is safetensors.serialize_file
    assert inspect.isclass(safetensors.safe_open)


def test_each_row_names_a_parameter_that_is_there() -> None:
    import importlib

    for row in LIBRARIES:
        try:
            module = importlib.import_module(row.module)
        except ImportError:
            continue
        function = getattr(module, row.name)
        try:
            parameters = list(inspect.signature(function).parameters)
        except ValueError:
            continue  # a class of C without a signature
        assert parameters[row.place] == row.parameter, row
