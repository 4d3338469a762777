"""The probe in a real process under the agent: from before the script to its end."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import pytest

from distdiag.events.base import Event
from distdiag.events.collectives import GroupCreated
from distdiag.events.files import FileAccess, FileClosed
from distdiag.events.lifecycle import Finished, ProbeDisabled
from distdiag.probes.files.calls import CALLS, Call
from distdiag.record.event_reader import EventReader
from distdiag.record.wire import EventDecoder, Interner
from tests.integration.launch import REPOSITORY

E = TypeVar("E", bound=Event)

PRELUDE = """
import os, sys
os.chdir(os.path.dirname(os.path.abspath(__file__)))
"""


class Run:
    """What a script wrote and said."""

    def __init__(self, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
        self.folder = folder
        self.stdout = done.stdout
        self.stderr = done.stderr
        self.exit_status = done.returncode
        decoder = EventDecoder(0, Interner())
        payloads = EventReader(folder / "run" / "attempt-0", 0).payloads()
        self._events = [decoder.decode(payload) for payload in payloads]

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in self._events if isinstance(event, kind)]

    def said(self) -> list[str]:
        """Return actions and names, for what lies in the folder of the script."""
        folder = f"{self.folder}/"
        return [
            f"{access.action} {access.path.removeprefix(folder)}"
            for access in self.events(FileAccess)
            if access.path.startswith(folder)
        ]


def run(folder: Path, body: str, *options: str, checked: bool = True) -> Run:
    """Run a script under the agent, without a launcher."""
    script = folder / "script.py"
    script.write_text(PRELUDE + body)
    tool = ["-m", "distdiag.check", "--run-dir", str(folder / "run"), "--report", "json", *options]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(tool if checked else ()), str(script)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    if not checked:
        (folder / "run" / "attempt-0").mkdir(parents=True)
    return Run(folder, done)


def test_a_script_without_torch_is_observed(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        """
with open("a.txt", "w") as file:
    file.write("x")
assert os.path.exists("a.txt")
open("a.txt").read()
os.remove("a.txt")
assert "torch" not in sys.modules
""",
    )

    assert result.exit_status == 0, result.stderr
    assert result.said() == ["write a.txt", "test a.txt", "read a.txt", "remove a.txt"]
    lines = [a.site.location.line for a in result.events(FileAccess) if a.site.location]
    assert lines == [5, 7, 8, 9]


def test_the_scripts_own_source_and_modules_are_no_accesses(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 1\n")
    result = run(
        tmp_path,
        """
import inspect, json, linecache, traceback
import helper
inspect.getsource(helper)
linecache.getline(helper.__file__, 1)
try:
    1 / 0
except ZeroDivisionError:
    traceback.format_exc()
""",
    )

    assert result.exit_status == 0, result.stderr
    assert result.said() == []


def test_a_write_that_nothing_follows_ends_with_the_script(tmp_path: Path) -> None:
    result = run(tmp_path, 'open("a.txt", "w").write("text")\n')

    (write,) = result.events(FileAccess)
    (end,) = result.events(FileClosed)
    (finished,) = result.events(Finished)
    assert end.access == write.seq
    assert end.seq < finished.seq
    assert end.content is not None
    assert end.content.size == 4


def test_a_guard_before_the_group_exists_is_seen(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        """
open("before", "w").close()
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
open("after", "w").close()
dist.destroy_process_group()
""",
    )

    accesses = {Path(a.path).name: a.seq for a in result.events(FileAccess)}
    created = [e.seq for e in result.events(GroupCreated) if e.api == "init_process_group"]
    assert accesses["before"] < created[0] <= created[-1] < accesses["after"]


def test_forked_children_write_nothing(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        """
import multiprocessing
def child():
    with open("child.txt", "w") as file:
        file.write("x")
    assert os.path.exists("child.txt")
    os.rename("child.txt", "renamed.txt")
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
assert process.exitcode == 0
assert os.path.exists("renamed.txt")
""",
    )

    assert result.exit_status == 0, result.stderr
    assert result.said() == ["test renamed.txt"]


def test_functions_reach_other_processes(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        """
import multiprocessing
if __name__ == "__main__":
    open("a", "w").close()
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(os.path.getsize, ["a"]), pool.map(os.listdir, ["."])[0] != [])
            pool.map(os.mkdir, [method])
""",
    )

    assert result.exit_status == 0, result.stderr
    assert result.stdout == "[0] True\n" * 2


def test_a_failure_of_ours_switches_the_probe_off_and_nothing_else(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        """
open("one", "w").close()
names = {}
exec("def explode(*args, **kwargs): raise RuntimeError('injected')", names)
from distdiag.probes.files.paths import FilePaths
FilePaths.find = names["explode"]
with open("two", "w") as file:
    file.write("x")
open("two").read()
os.rename("two", "three")
print(os.path.exists("three"), sorted(os.listdir(".")))
""",
    )

    assert result.exit_status == 0, result.stderr
    assert result.stdout.startswith("True ['one', 'run', 'script.py', 'three']")
    assert result.said() == ["write one"]
    (disabled,) = result.events(ProbeDisabled)
    assert disabled.probe == "files"
    assert "injected" in disabled.reason
    report = (tmp_path / "run" / "report.json").read_text()
    assert "DIA003" in report


def test_a_failure_before_a_collective_leaves_its_record(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
file = open("one", "w")
names = {}
exec("def explode(*args, **kwargs): raise RuntimeError('injected')", names)
from distdiag.probes.files.open_files import OpenFiles
OpenFiles.settle = names["explode"]
dist.barrier()
dist.barrier()
dist.destroy_process_group()
""",
    )

    assert result.exit_status == 0, result.stderr
    assert [event.probe for event in result.events(ProbeDisabled)] == ["files"]


OUTPUT = """
import io, pickle, shutil, tempfile, traceback, warnings, fcntl, pathlib, errno
warnings.simplefilter("always")
os.makedirs("d/e", exist_ok=True)
os.makedirs("d/e", exist_ok=True)
for action in (
    lambda: open("none"), lambda: open("d"), lambda: open("d/x", "q"), lambda: open("d/x", "x"),
    lambda: open("d/x", "x"), lambda: os.open("none", 0), lambda: os.listdir("none"),
    lambda: os.rename("none", "x"), lambda: os.mkdir("d"), lambda: os.rmdir("d"),
    lambda: os.remove("d"), lambda: shutil.rmtree("none"), lambda: os.path.getsize("none"),
    lambda: os.access("none", 4), lambda: os.scandir("none"), lambda: os.link("none", "y"),
    lambda: open("d/x", "w", 0), lambda: pathlib.Path("none").read_text(),
    lambda: fcntl.flock(-1, 2), lambda: os.truncate("none", 1), lambda: open("\\0"),
):
    try:
        result = action()
    except Exception as error:
        print(type(error).__name__, error, getattr(error, "errno", None))
    else:
        print(type(result).__name__)
with open("d/y", "w+") as file:
    print(file.write("hello"), file.tell(), file.mode, file.name, file.fileno() > 2)
    file.seek(0)
    print(file.read(), file.encoding is not None)
print(os.fstat(os.open("d/y", os.O_RDONLY)).st_size)
print(sorted(os.walk("d")))
print([type(each).__name__ for each in os.scandir("d")])
print(os.open in os.supports_dir_fd, os.stat in os.supports_fd, open is io.open)
print(pickle.loads(pickle.dumps([open, os.remove, os.path.exists])) == [open, os.remove,
      os.path.exists])
print(shutil.rmtree.avoids_symlink_attacks, shutil.rmtree("d"), os.path.exists("d"))
"""


def warnings_of(result: Run) -> list[str]:
    lines = result.stderr.replace(str(result.folder), "").splitlines()
    return [line for line in lines if "Warning" in line]


def test_a_script_prints_what_it_prints_alone(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "observed").mkdir()
    alone = run(tmp_path / "alone", OUTPUT, checked=False)
    observed = run(tmp_path / "observed", OUTPUT)

    assert alone.exit_status == 0, alone.stderr
    assert observed.stdout == alone.stdout
    assert observed.exit_status == 0, observed.stderr
    assert warnings_of(observed) == warnings_of(alone) != []


@pytest.mark.parametrize("row", [row for row in CALLS if row.api != "sqlite3.connect"])
def test_each_row_names_parameters_that_are_there(row: Call) -> None:
    owner, _, name = row.api.partition(".")
    parameters = inspect.signature(getattr({"os": os, "shutil": shutil}[owner], name)).parameters

    assert tuple(parameters)[: len(row.names)] == row.names
