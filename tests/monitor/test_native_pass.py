from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from distdiag.dumps.base import dump_ranks
from distdiag.dumps.process.kernel import Task
from distdiag.dumps.stacks.py_spy import PySpyNative
from distdiag.events.base import Frame
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.monitor.monitor import MOST_RANKS, NativePass

FINDING = Finding(
    code="HNG011",
    name="unreleased-lock",
    severity=Severity.ERROR,
    grade=Grade.LIKELY,
    confidence=0.8,
    message="rank 1 waits",
    ranks=RankSet([1]),
    evidence=(),
)


def _finished(native: NativePass) -> NativePass:
    assert native._thread is not None
    native._thread.join(60)
    assert not native._thread.is_alive()
    return native


def _stacks(rank: int, *names: str, error: str = "") -> Stacks:
    thread = ThreadStack("MainThread", tuple(Frame("lib.so", 0, name) for name in names))
    threads = (thread,) if names else ()
    return Stacks(rank=rank, seq=-1, time_ns=0, source="t", threads=threads, error=error)


def test_before_it_has_seen_anything_findings_stay_as_they_are() -> None:
    assert NativePass(lambda ranks: ()).added_to([FINDING]) == (FINDING,)


def test_what_was_seen_of_the_culprits_becomes_evidence() -> None:
    seen = (_stacks(0, "main"), _stacks(1, "__futex_wait", "PyThread_acquire_lock"))
    native = NativePass(lambda ranks: seen)
    native.start([0, 1])
    (finding,) = _finished(native).added_to([FINDING])
    assert [e.summary for e in finding.evidence] == [
        "native frames: __futex_wait < PyThread_acquire_lock"
    ]
    assert finding.identity == FINDING.identity


def test_a_failure_is_said_and_few_ranks_are_stopped() -> None:
    asked: list[int] = []

    def look(ranks: list[int]) -> tuple[Stacks, ...]:
        asked.extend(ranks)
        return (_stacks(1, error="ptrace is forbidden"),)

    native = NativePass(look)  # type: ignore[arg-type]
    native.start(range(100))
    (finding,) = _finished(native).added_to([FINDING])
    assert "ptrace is forbidden" in finding.evidence[0].summary
    assert asked == list(range(MOST_RANKS))


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
    (finding,) = _finished(native).added_to([FINDING])
    assert "read" in finding.evidence[0].summary
    assert waiting.poll() is None
