from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.probes.process import post_mortem as flight_recorder
from distdiag.probes.process.post_mortem import PostMortem, _handler_of, dump_flight_recorder
from distdiag.record.run_dir import RunDir, StackSignal
from tests.probes.conftest import Observed

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "run", 0)
    run_dir.folder.mkdir(parents=True)
    return run_dir


@pytest.fixture
def probe(observed: Observed, run_dir: RunDir) -> Iterator[PostMortem]:
    probe = PostMortem(observed.recorder, run_dir)
    probe.install()
    assert not probe.is_off
    yield probe
    probe.uninstall()


def reported(run_dir: RunDir) -> StackSignal:
    return msgspec.json.decode(run_dir.stack_signal(0).read_bytes(), type=StackSignal)


def test_the_signal_is_one_that_nobody_uses(probe: PostMortem, run_dir: RunDir) -> None:
    probe.beat()

    now = reported(run_dir)
    assert signal.SIGRTMIN < now.signal < signal.SIGRTMAX
    assert signal.getsignal(now.signal) is signal.SIG_DFL  # the script sees nothing of it
    assert (now.pid, now.thread) == (os.getpid(), threading.get_native_id())
    assert Path(f"/proc/self/fd/{now.descriptor}").samefile(run_dir.stacks(0))
    assert now.names[threading.get_ident()] == "MainThread"
    assert run_dir.stacks(0).stat().st_mode & 0o777 == 0o600


def test_a_signal_in_use_is_left_alone(observed: Observed, run_dir: RunDir) -> None:
    first = PostMortem(observed.recorder, run_dir)
    first.install()
    first.beat()
    taken = reported(run_dir).signal
    first.uninstall()
    assert not run_dir.stack_signal(0).exists()
    signal.signal(taken, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [taken - 1])
    try:
        second = PostMortem(observed.recorder, run_dir)
        second.install()
        second.beat()
        assert reported(run_dir).signal == taken - 2
        second.uninstall()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [taken - 1])
        signal.signal(taken, signal.SIG_DFL)


def test_the_signal_is_as_it_was_afterwards(observed: Observed, run_dir: RunDir) -> None:
    probe = PostMortem(observed.recorder, run_dir)
    probe.install()
    probe.beat()
    number = reported(run_dir).signal
    assert _handler_of(number) != signal.SIG_DFL

    probe.uninstall()

    assert _handler_of(number) == signal.SIG_DFL
    assert not faulthandler.unregister(number)
    probe.uninstall()  # twice changes nothing


def test_a_signal_that_the_script_takes_is_given_up(
    observed: Observed, probe: PostMortem, run_dir: RunDir
) -> None:
    probe.beat()
    number = reported(run_dir).signal
    seen: list[int] = []
    signal.signal(number, lambda taken, _: seen.append(taken))
    try:
        probe.beat()
        (event,) = observed.events(ProbeDisabled)
        assert event.probe == "post-mortem"
        assert f"the handler of signal {number} was replaced" in event.reason
        assert not run_dir.stack_signal(0).exists()
        signal.raise_signal(number)
        assert seen == [number]
    finally:
        signal.signal(number, signal.SIG_DFL)


def test_a_signal_that_was_only_put_back_is_taken_again(
    observed: Observed, probe: PostMortem, run_dir: RunDir
) -> None:
    probe.beat()
    number = reported(run_dir).signal
    signal.signal(number, signal.getsignal(number))  # as Python knows it
    assert _handler_of(number) == signal.SIG_DFL

    probe.beat()

    assert not observed.events(ProbeDisabled)
    signal.raise_signal(number)
    assert b"most recent call first" in run_dir.stacks(0).read_bytes()


def test_stacks_are_written_on_request(probe: PostMortem, run_dir: RunDir) -> None:
    probe.beat()
    assert run_dir.stacks(0).read_bytes() == b""
    run_dir.wanted(0, "stacks").touch()

    probe.beat()

    assert not run_dir.wanted(0, "stacks").exists()
    assert "in test_stacks_are_written_on_request" in run_dir.stacks(0).read_text()
    size = run_dir.stacks(0).stat().st_size
    probe.beat()
    assert run_dir.stacks(0).stat().st_size == size


def test_nothing_is_answered_once_the_rank_has_finished(
    observed: Observed, probe: PostMortem, run_dir: RunDir
) -> None:
    observed.recorder.close()
    run_dir.wanted(0, "stacks").touch()

    probe.beat()

    assert run_dir.wanted(0, "stacks").exists()


def test_a_failure_switches_only_the_probe_off(
    observed: Observed, probe: PostMortem, run_dir: RunDir
) -> None:
    for path in run_dir.folder.iterdir():
        path.unlink()
    run_dir.folder.rmdir()

    probe.beat()

    assert probe.is_off
    (event,) = observed.events(ProbeDisabled)
    assert event.reason.startswith("FileNotFoundError")


def test_a_probe_that_cannot_be_installed_says_why(observed: Observed, tmp_path: Path) -> None:
    probe = PostMortem(observed.recorder, RunDir(tmp_path / "nowhere", 0))

    probe.install()
    probe.beat()

    (event,) = observed.events(ProbeDisabled)
    assert event.reason.startswith("FileNotFoundError")


def test_the_flight_recorder_is_written_on_request(
    probe: PostMortem, run_dir: RunDir, lone_group: None
) -> None:
    dist.all_reduce(torch.ones(3))
    run_dir.wanted(0, "flight").touch()

    probe.beat()

    answer = json.loads(run_dir.flight(0).read_bytes())
    assert answer["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    assert answer["entries"][-1]["input_sizes"] == [[3]]
    assert not run_dir.second_flight(0).exists()
    assert not run_dir.wanted(0, "flight").exists()


def test_a_recorder_that_is_off_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
    assert error_of(dump_flight_recorder()) == (
        "the flight recorder is off: TORCH_NCCL_TRACE_BUFFER_SIZE is 0"
    )
    # The newer name counts where both are set.
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "10")
    assert "is off" not in str(dump_flight_recorder())


def test_a_torch_without_the_recorder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "_DUMPS", ("_dump_of_another_torch",))
    assert error_of(dump_flight_recorder()) == "this torch has no flight recorder that writes JSON"


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("pass", "torch.distributed is not imported"),
        ("import torch.distributed", "the flight recorder has no entries"),
    ],
)
def test_nothing_is_imported_or_invented_for_an_answer(imports: str, expected: str) -> None:
    code = (
        f"{imports}\nimport sys\n"
        "from distdiag.probes.process.post_mortem import dump_flight_recorder\n"
        "before = set(sys.modules)\nprint(dump_flight_recorder()[0].decode())\n"
        "assert set(sys.modules) == before"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert json.loads(done.stdout) == {"error": expected}


def test_two_recorders_are_reported_apart(
    monkeypatch: pytest.MonkeyPatch, probe: PostMortem, run_dir: RunDir, lone_group: None
) -> None:
    dist.barrier()
    monkeypatch.setattr(flight_recorder, "_DUMPS", ("_dump_fr_trace_json",) * 2)
    run_dir.wanted(0, "flight").touch()

    probe.beat()

    assert json.loads(run_dir.flight(0).read_bytes())["entries"]
    assert json.loads(run_dir.second_flight(0).read_bytes())["entries"]


def error_of(answer: tuple[bytes, bytes | None]) -> str:
    data, second = answer
    assert second is None
    return str(json.loads(data)["error"])


SCRIPT = """
import signal, sys, time
def name(handler): return getattr(handler, "__qualname__", str(handler))
print([name(signal.getsignal(n)) for n in range(1, 65) if n not in (32, 33)])
time.sleep(2)
print("done")
sys.stdout.flush()
"""


def test_a_script_behaves_the_same_under_the_agent(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plain = run_script([str(script)], tmp_path)
    root = tmp_path / "observed"
    under = run_script(
        ["-m", "distdiag.check", "--run-dir", str(root), "--report", "json", str(script)], tmp_path
    )
    assert plain.stdout == under.stdout
    assert plain.stdout.endswith("done\n")
    assert (plain.returncode, under.returncode) == (0, 0)
    assert plain.stderr == under.stderr == ""
    stacks = root / "attempt-0" / "rank-0.stacks"
    assert stacks.read_bytes() == b""


CLOSING = """
import faulthandler, os, sys, time
from pathlib import Path
folder = Path(sys.argv[1], "attempt-0")
wanted = folder / "rank-0.wanted-stacks"

def ask():
    wanted.touch()
    end = time.monotonic() + 60
    while wanted.exists():
        assert time.monotonic() < end
        time.sleep(0.02)

time.sleep(1.2)
last = int(sys.argv[2])
os.closerange(3, last)
files = [open(f"mine-{number}", "w+b") for number in range(12)]
if last > 256:
    for number in range(256, last):
        os.dup2(files[0].fileno(), number)
ask()
ask()
print([os.path.getsize(file.name) for file in files])
for file in files:
    file.close()
own = open("own", "w")
faulthandler.enable(own)
faulthandler.dump_traceback(own)
print(faulthandler.is_enabled())
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("last", [256, 4096])
def test_descriptors_that_a_script_closes_and_opens_are_its_own(tmp_path: Path, last: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(CLOSING)
    root = tmp_path / "run"
    options = ["-m", "distdiag.check", "--run-dir", str(root), "--report", "json"]
    raising = (
        f"import os, resource, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, ({last}, {last}))\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    launcher = ["-c", raising, sys.executable] if last > 256 else []
    done = run_script([*launcher, *options, str(script), str(root), str(last)], tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{[0] * 12}\nTrue\n"), done.stderr
    assert "most recent call first" in (tmp_path / "own").read_text()
    text = (root / "attempt-0" / "rank-0.stacks").read_text()
    assert text.count("in ask") == 2
    assert not list(root.glob("attempt-0/*wanted*"))


def run_script(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
