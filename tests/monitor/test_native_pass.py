from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from distdiag.checks import Check
from distdiag.dumps.base import dump_ranks
from distdiag.dumps.process.kernel import Task
from distdiag.dumps.stacks.py_spy import PySpyNative
from distdiag.engine import Engine
from distdiag.events.base import Frame
from distdiag.events.lifecycle import RankStarted
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.monitor.monitor import MOST_NATIVE, NativePass

WAITING = Finding(
    code="HNG011",
    name="unreleased-lock",
    severity=Severity.ERROR,
    grade=Grade.LIKELY,
    confidence=0.8,
    message="rank 1 waits",
    ranks=RankSet([1]),
    evidence=(),
)


class Waiting(Check[RankStarted]):
    code, name, severity = WAITING.code, WAITING.name, WAITING.severity

    def check(self, view):
        yield WAITING


def finished(native):
    native._thread.join(60)
    assert not native._thread.is_alive()
    return native.poll()


def native_stacks(rank, *names, error=""):
    thread = ThreadStack("MainThread", tuple(Frame("lib.so", 0, name) for name in names))
    return Stacks(
        rank=rank,
        seq=-1,
        time_ns=0,
        source="t",
        threads=(thread,) if names else (),
        error=error,
        is_native=True,
    )


def found_with(*seen):
    """Let an engine find that rank 1 waits, and see this."""
    engine = Engine([Waiting()], RankSet([0, 1]))
    engine.feed(
        RankStarted(
            rank=1, seq=0, time_ns=0, local_rank=1, world_size=2, hostname="", pid=1, python="",
            command=(), unix_ns=0,
        )
    )  # fmt: skip
    for event in seen:
        engine.feed(event)
    (finding,) = engine.findings
    return engine, finding


def test_what_was_seen_of_the_culprits_becomes_evidence():
    _, before = found_with()
    assert before == WAITING
    seen = native_stacks(0, "main"), native_stacks(1, "__futex_wait", "PyThread_acquire_lock")
    engine, finding = found_with(*seen)
    assert [e.summary for e in finding.evidence] == [
        "native frames: __futex_wait < PyThread_acquire_lock"
    ]
    assert finding.identity == WAITING.identity
    assert engine.states()[1].stacks is None


def test_a_failure_is_said():
    _, finding = found_with(native_stacks(1, error="ptrace is forbidden"))
    assert "ptrace is forbidden" in finding.evidence[0].summary


def test_few_ranks_are_stopped_once_and_told_once():
    asked = []

    def look(ranks):
        asked.extend(ranks)
        return (native_stacks(1, "main"),)

    native = NativePass(look)
    assert native.poll() == ()
    native.start(range(100))
    assert finished(native) == (native_stacks(1, "main"),)
    native.start(range(100))
    assert native.poll() == ()
    assert asked == list(range(MOST_NATIVE))


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    code = "import threading; print('here', flush=True); threading.Lock().__enter__(); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    while Task(process.pid).call.name != "read":
        time.sleep(0.01)
    yield process
    process.kill()
    process.communicate()


def test_a_real_process_shows_functions_of_c(waiting: subprocess.Popen[bytes]) -> None:
    native = NativePass(lambda ranks: dump_ranks(PySpyNative(None), {1: waiting.pid}, timeout_s=60))
    native.start([1])
    _, finding = found_with(*finished(native))
    assert "read" in finding.evidence[0].summary
    assert waiting.poll() is None
