from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest

from distdiag.events.base import Event
from distdiag.events.lifecycle import Finished, ProbeDisabled, Raised, RankStarted
from distdiag.record.event_reader import EventReader
from distdiag.record.run_dir import Verdict
from distdiag.record.wire import EventDecoder, Interner

REPOSITORY = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]


def _python(
    arguments: Sequence[str], folder: Path, env: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    paths = [env.get("PYTHONPATH", ""), str(REPOSITORY)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run this text as a script under the check, alone and without a launcher."""

    def run_check(
        text: str = "",
        options: Sequence[str] = (),
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "train.py"
        script.write_text(text)
        command = ["-m", "distdiag.check", "--run-dir", "run", *options]
        return _python([*command, "train.py", *args], tmp_path, env or {})

    return run_check


def _events(folder: Path, rank: int = 0) -> list[Event]:
    decoder = EventDecoder(rank, Interner())
    payloads = EventReader(folder / "run" / "attempt-0", rank).payloads()
    return [event for event in map(decoder.decode, payloads) if event is not None]


def test_the_script_keeps_its_own_arguments(run: Run) -> None:
    done = run("import sys; print(sys.argv)", args=["--profile", "mine", "-m", "x"])

    assert done.stdout == "['train.py', '--profile', 'mine', '-m', 'x']\n"
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no data')", 1),
        ("raise SystemExit(None)", 0),
        ("raise ValueError('x')", 1),
    ],
)
def test_the_status_of_the_script_is_kept_and_recorded(
    text: str, status: int, run: Run, tmp_path: Path
) -> None:
    done = run(text)

    assert done.returncode == status, done.stderr
    started, *_, finished = _events(tmp_path)
    assert isinstance(started, RankStarted)
    assert started.command == ("train.py",)
    assert isinstance(finished, Finished)
    assert finished.exit_status == status


def test_the_end_is_recorded_after_the_exit_handlers_of_the_script(
    run: Run, tmp_path: Path
) -> None:
    done = run(
        "import atexit, time\n"
        "def last(): open('handler', 'w').write(str(time.monotonic_ns()))\n"
        "atexit.register(last)\n"
    )

    assert done.returncode == 0
    finished = _events(tmp_path)[-1]
    assert isinstance(finished, Finished)
    assert finished.time_ns > int((tmp_path / "handler").read_text())


def test_an_uncaught_exception_is_recorded_and_shown_without_our_frames(
    run: Run, tmp_path: Path
) -> None:
    done = run("def train():\n    raise KeyError('weight')\ntrain()\n")

    assert "distdiag/" not in done.stderr.split("KeyError")[0]
    raised = next(event for event in _events(tmp_path) if isinstance(event, Raised))
    assert (raised.type, raised.frames[0].function, raised.frames[0].line) == (
        "KeyError",
        "train",
        2,
    )


def test_a_keyboard_interrupt_ends_the_process_as_python_does(run: Run) -> None:
    done = run("raise KeyboardInterrupt")

    assert done.returncode == -signal.SIGINT


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "job"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import sys\nfrom . import __name__ as package\n"
        "print(__name__, package, __spec__.name, sys.argv[1:])\n"
    )
    command = ["-m", "distdiag.check", "--run-dir", "run", "-m", "job.train", "-x"]

    done = _python(command, tmp_path)

    assert done.stdout == "__main__ job job.train ['-x']\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument"),
        (["--no-such-option", "train.py"], "--no-such-option"),
        (["no_such_file.py"], "does not exist"),
        (["."], "is a folder without a __main__.py"),
        (["-"], "stdin"),
        (["-m", "no_such_module"], "no_such_module"),
        (["--select", "XYZ999", "train.py"], "XYZ999"),
        (["--report", "hologram", "train.py"], "hologram"),
        (["--config", "absent.toml", "train.py"], "absent.toml"),
        (["--run-dir", "/proc/nowhere", "train.py"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_clear_line_and_status_2(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('ran')")

    done = _python(["-m", "distdiag.check", *arguments], tmp_path)

    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("distdiag: ")
    assert words in line


def test_a_used_run_directory_is_refused_unless_it_may_be_overwritten(run: Run) -> None:
    assert run("").returncode == 0

    again = run("")
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert run("", options=["--overwrite"]).returncode == 0


def test_only_the_first_local_rank_says_what_all_got_wrong(run: Run) -> None:
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    done = run("", options=["--profile", "huge"], env={**ranks, "RANK": "1", "LOCAL_RANK": "1"})

    assert (done.returncode, done.stderr) == (2, "")


def test_an_agent_that_cannot_write_lets_the_script_run(run: Run, tmp_path: Path) -> None:
    # A run directory of another rank of this launch, in which the event file cannot be made.
    done = run(
        "print('trained')",
        env={"PYTHONPATH": _broken_agent(tmp_path)},
    )

    assert done.stdout == "trained\n"
    assert done.returncode == 0
    assert "runs unobserved" in done.stderr


def _broken_agent(folder: Path) -> str:
    (folder / "sitecustomize.py").write_text(
        "import os\n"
        "real = os.posix_fallocate\n"
        "def full(*args): raise OSError(28, 'No space left on device')\n"
        "os.posix_fallocate = full\n"
    )
    return str(folder)


def test_a_monitor_that_cannot_start_is_said_once_and_the_script_runs(
    run: Run, tmp_path: Path
) -> None:
    done = run(
        "import sys; print('trained'); sys.exit(4)", env={"PYTHONPATH": _no_monitor(tmp_path)}
    )

    assert done.stdout == "trained\n"
    assert done.returncode == 4
    assert done.stderr.count("monitor cannot be started") == 1


def _no_monitor(folder: Path) -> str:
    (folder / "sitecustomize.py").write_text(
        "import subprocess\n"
        "def refuse(*args, **kwargs): raise OSError('no processes left')\n"
        "subprocess.Popen = refuse\n"
    )
    return str(folder)


def _fake_monitor(folder: Path, verdict: Verdict) -> str:
    """Replace the monitor by a process that only gives this verdict."""
    program = folder / "fake_monitor.py"
    program.write_text(
        "import pathlib, sys\n"
        "root, attempt = sys.argv[1:]\n"
        "path = pathlib.Path(root, f'attempt-{attempt}', 'verdict.json')\n"
        f"path.write_bytes({msgspec.json.encode(verdict)!r})\n"
    )
    (folder / "sitecustomize.py").write_text(
        "import subprocess, sys\n"
        "real = subprocess.Popen\n"
        "def popen(command, *args, **kwargs):\n"
        "    if 'distdiag.monitor' in command:\n"
        f"        command = [sys.executable, '-S', {str(program)!r}, *command[-2:]]\n"
        "    return real(command, *args, **kwargs)\n"
        "subprocess.Popen = popen\n"
    )
    return str(folder)


@pytest.mark.parametrize(
    ("own", "verdict", "restarts_left", "expected"),
    [(0, 0, 0, 0), (0, 1, 0, 1), (3, 1, 0, 3), (0, 1, 1, 0)],
)
def test_a_finding_fails_a_script_that_succeeded_and_will_not_be_restarted(
    own: int, verdict: int, restarts_left: int, expected: int, run: Run, tmp_path: Path
) -> None:
    error_file = tmp_path / "error.json"
    done = run(
        f"import sys; print('out'); sys.exit({own})",
        env={
            "PYTHONPATH": _fake_monitor(tmp_path, Verdict(exit_status=verdict, summary="COL001")),
            "TORCHELASTIC_MAX_RESTARTS": str(restarts_left),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
        },
    )

    assert done.returncode == expected, done.stderr
    assert done.stdout == "out\n"
    assert error_file.exists() == (own == 0 and expected == 1)
    if error_file.exists():
        assert json.loads(error_file.read_text())["message"]["message"] == "COL001"


def test_a_forked_child_writes_nothing(run: Run, tmp_path: Path) -> None:
    done = run(
        "import os, sys\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print('child'); sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["child", "5"]
    assert [event.exit_status for event in _events(tmp_path) if isinstance(event, Finished)] == [0]


def test_the_agents_thread_is_none_of_the_scripts(run: Run) -> None:
    done = run("import threading; print(threading.active_count(), len(threading.enumerate()))")

    assert done.stdout == "1 1\n"


def test_the_import_of_torch_is_left_to_the_script(run: Run) -> None:
    done = run("import sys; print('torch' in sys.modules, 'rich' in sys.modules)")

    assert done.stdout == "False False\n"


def test_probes_come_with_the_import_of_torch(run: Run, tmp_path: Path) -> None:
    done = run("import torch; print(torch.__spec__.loader is torch.__loader__)")

    assert done.stdout == "True\n", done.stderr
    assert "TorchLoaded" in [type(event).__name__ for event in _events(tmp_path)]
    assert not [event for event in _events(tmp_path) if isinstance(event, ProbeDisabled)]


def test_a_script_may_attach_and_detach_by_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import distdiag\n"
        "distdiag.attach(run_dir='run', report=('json',))\n"
        "distdiag.attach()\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "distdiag.detach()\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
        "print('done')\n"
    )

    done = _python(["train.py"], tmp_path)

    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    names = [type(event).__name__ for event in _events(tmp_path)]
    assert names.count("Collective") == 1


@pytest.mark.parametrize("spelled", ["--local_rank=0", "--local-rank=0"])
@pytest.mark.parametrize("kind", [["train.py"], ["-m", "train"]])
def test_the_local_rank_that_a_launcher_puts_first_is_handed_to_the_script(
    spelled: str, kind: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    options = ["-m", "distdiag.check", spelled, "--run-dir", "run", "--report", "json"]

    done = _python([*options, *kind, "--lr", "1"], tmp_path)

    assert (done.returncode, done.stdout) == (0, f"{[spelled, '--lr', '1']}\n"), done.stderr


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"LOCAL_RANK": "1"}, "rank 1 of 1"),
        ({"RANK": "4", "WORLD_SIZE": "2"}, "rank 4 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "900000000"}, "so many ranks"),
    ],
)
def test_an_environment_that_contradicts_itself_does_not_stop_the_script(
    env: dict[str, str], words: str, run: Run, tmp_path: Path
) -> None:
    done = run("print('trained')", env=env)

    assert (done.returncode, done.stdout) == (0, "trained\n")
    (line,) = done.stderr.splitlines()
    assert "runs unobserved" in line
    assert words in line
    assert not (tmp_path / "run").exists()


def test_a_script_that_leaves_by_os_exit_has_finished_with_its_status(
    run: Run, tmp_path: Path
) -> None:
    done = run("import os\nos._exit(4)")

    assert done.returncode == 4, done.stderr
    (end,) = [event for event in _events(tmp_path) if isinstance(event, Finished)]
    assert end.exit_status == 4


def test_a_forked_child_that_leaves_by_os_exit_does_not_end_the_rank(
    run: Run, tmp_path: Path
) -> None:
    done = run("import os\npid = os.fork()\nif not pid: os._exit(7)\nos.waitpid(pid, 0)")

    assert done.returncode == 0, done.stderr
    (end,) = [event for event in _events(tmp_path) if isinstance(event, Finished)]
    assert end.exit_status == 0


def test_a_handler_that_raises_at_the_end_leaves_the_end_told(run: Run, tmp_path: Path) -> None:
    done = run(
        "import atexit, signal, sys\n"
        "from distdiag.agent.agent import RankAgent\n"
        "def stop(*_): sys.exit(4)\n"
        "def interrupted(): signal.raise_signal(signal.SIGALRM)\n"
        "signal.signal(signal.SIGALRM, stop)\n"
        "atexit.register(lambda: 1 / 0)\n"
        "RankAgent.current.probes[0].flush = interrupted\n"
    )

    assert "ZeroDivisionError" in done.stderr
    (finished,) = [event for event in _events(tmp_path) if isinstance(event, Finished)]
    assert finished.exit_status == 0
    assert not any(isinstance(event, ProbeDisabled) for event in _events(tmp_path))


def test_what_the_interpreter_calls_at_its_end_is_called_as_without_the_tool(
    run: Run, tmp_path: Path
) -> None:
    done = run(
        "import atexit, os\n"
        "open('cache', 'w').close()\n"
        "atexit.register(os.remove, 'cache')\n"
        "atexit.register(os.path.exists, 'cache')\n"
        "atexit.register(open, 'left', 'w')\n"
        "atexit.register(open, __file__)\n"
    )

    assert (done.returncode, "Exception ignored" in done.stderr) == (0, False), done.stderr
    assert not (tmp_path / "cache").exists()
    assert (tmp_path / "left").exists()
    assert not any(isinstance(event, ProbeDisabled) for event in _events(tmp_path))
