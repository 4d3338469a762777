"""Watches the ranks of one node: ``python -m distdiag.monitor RUN_DIR ATTEMPT``.

A process of its own: it follows what the ranks leave behind, takes their stacks when something goes
wrong, and tells of it. It outlives killed and stuck ranks, and ends by itself when they are gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from distdiag.checks import Check, load_checks
from distdiag.config import Config
from distdiag.dumps.base import dump_ranks
from distdiag.dumps.proc import Process, kill_families, wait_for_end, wait_for_pid_file
from distdiag.dumps.py_spy import PySpy
from distdiag.engine import Engine
from distdiag.errors import DamagedFileError
from distdiag.event import Exited, Finished
from distdiag.finding import Finding, Report
from distdiag.ranks import RankSet
from distdiag.reporter import RunReporter, crash_finding, say
from distdiag.reports import one_line
from distdiag.run_dir import LaunchFile, RunDir, write_atomically
from distdiag.status_page import read_status
from distdiag.transports.files import LocalFiles
from distdiag.user_code import main_script

T = TypeVar("T")

_log = logging.getLogger(__name__)

BUSY_S: Final = 0.02
CALM_S: Final = 0.05
IDLE_S: Final = 0.2
IDLE_AFTER_S: Final = 30.0
NOBODY_CAME_S: Final = 120.0
LATE_COMER_S: Final = 10.0
UNKILLABLE_S: Final = 10.0
"""A rank that was killed may stay, in the kernel, for ever: so long it is waited for."""
DESERTED_S: Final = 0.5
REWRITE_EVERY_S: Final = 5.0
"""The report is written again this often, so that it is fresh if the monitor itself is killed."""
HANG_DUMP_S: Final = 10.0
LAST_DUMP_S: Final = 2.0
"""The launcher kills the peers of a rank that raised or died: their stacks are in a hurry."""
PREDECESSOR_S: Final = 5.0


class Monitor:
    """The watch over one attempt of a run on this node."""

    def __init__(self, run_dir: RunDir, launch_file: LaunchFile, config: Config) -> None:
        """Prepare to watch; nothing is read of the ranks yet."""
        launch = launch_file.launch
        self._run_dir = run_dir
        self._config = config
        self._reporter = RunReporter(run_dir, launch_file, config)
        self._attendance = self._reporter.attendance
        self._launcher = Process(launch.parent_pid)
        self._processes: dict[int, Process] = {}
        self._source = LocalFiles(run_dir, launch.local_ranks, self._watch)
        self._stack_source = PySpy(main_script(launch_file.command, launch_file.cwd))
        self._own_findings: list[Finding] = []
        catalogue: Mapping[str, type[Check]] = self._guarded(load_checks, MappingProxyType({}))
        selects = config.selection.selects
        self._left_out = {
            code: "left out by --select or --ignore" for code in catalogue if not selects(code)
        }
        self._engine = Engine(
            [check() for code, check in catalogue.items() if selects(code)],
            RankSet(launch.local_ranks),
            hang_timeout_s=config.hang_timeout_s,
        )
        self._announced: set[tuple[object, ...]] = set()
        self._answered: set[int] = set()
        self._mourned = False
        self._has_verdict = False
        self._started_s = self._moved_s = time.monotonic()
        self._written_s = self._all_came_s = self._aborted_s = self._deserted_s = 0.0

    def run(self) -> None:
        """Watch until all ranks have ended, and leave the report and the verdict."""
        if not self._guarded(self._attend, False):
            self._outlive()
        self._conclude()

    def _attend(self) -> bool:
        while True:
            has_news = self._look()
            if self._is_over():
                break
            wait_for_end(self._living(), self._pause_s(has_news))
        if not self._reporter.aborted:
            self._engine.finish()
        return True

    def _look(self) -> bool:
        """Take in what is new and act on it; return whether anything was."""
        has_news = False
        for event in self._source.poll():
            has_news = has_news or event.seq >= 0
            self._reporter.feed(event)
            if not self._reporter.aborted:
                # What the abort itself does to the ranks is no finding.
                self._engine.feed(event)
        self._reporter.pids = self._source.pids
        self._see_last_stacks()
        now_ns = time.monotonic_ns()
        if not self._reporter.aborted:
            self._engine.tick(now_ns)
            if self._engine.evidence_wanted:
                self._see_stacks(self._engine.evidence_wanted, HANG_DUMP_S)
        self._attendance.settle(is_hung=self._engine.is_hung)
        self._announce()
        self._abort_if_asked()
        self._release_rank_0()
        return has_news

    def _pause_s(self, has_news: bool) -> float:
        now_s = time.monotonic()
        if has_news:
            self._moved_s = now_s
            return BUSY_S
        return CALM_S if now_s - self._moved_s < IDLE_AFTER_S else IDLE_S

    def _is_over(self) -> bool:
        ended, came = self._attendance.ended, RankSet(self._source.pids)
        if ended == self._attendance.ranks:
            return True
        now_s = time.monotonic()
        if self._aborted_s and now_s - self._aborted_s > UNKILLABLE_S:
            return True
        if not came:
            return self._launcher.is_gone or now_s - self._started_s > NOBODY_CAME_S
        if not came <= ended:
            self._all_came_s = 0.0
            return False
        # All that came have ended; others may still be on their way.
        self._all_came_s = self._all_came_s or now_s
        return self._launcher.is_gone or now_s - self._all_came_s > LATE_COMER_S

    def _watch(self, pid: int, start_ticks: int) -> Process:
        process = self._processes[pid] = Process(pid, start_ticks)
        return process

    def _living(self) -> list[Process]:
        gone = {self._source.pids[rank] for rank in self._attendance.gone}
        return [process for pid, process in self._processes.items() if pid not in gone]

    def _see_last_stacks(self) -> None:
        """When a rank raised or died, see where its peers are before the launcher ends them."""
        raised = self._attendance.raised
        new = set(raised) - self._answered
        died = bool(self._attendance.died) and not (self._mourned or self._reporter.aborted)
        if (new or died) and not (self._mourned or self._answered):
            self._see_stacks(self._attendance.undisturbed & self._source.pids.keys(), LAST_DUMP_S)
        self._mourned = self._mourned or died
        for rank in new:
            self._answered.add(rank)
            self._reporter.save(self._run_dir.ack(rank), b"")

    def _see_stacks(self, ranks: Iterable[int], timeout_s: float) -> None:
        wanted = set(ranks)
        pids = {
            rank: pid
            for rank, pid in self._source.pids.items()
            if rank in wanted and not self._processes[pid].is_gone
        }
        for stacks in dump_ranks(self._stack_source, pids, timeout_s=timeout_s):
            self._engine.feed(stacks)
        for rank in wanted - pids.keys():
            self._engine.feed(self._stack_source.stacks(rank, error="there is no process"))

    def _announce(self) -> None:
        new = [f for f in self._findings() if f.identity not in self._announced]
        if not new and time.monotonic() - self._written_s < REWRITE_EVERY_S:
            return
        self._publish()
        for finding in new:
            self._announced.add(finding.identity)
            say(f"{one_line(finding)}\n")

    def _publish(self, *, complete: bool = False) -> Report:
        self._written_s = time.monotonic()
        report = self._reporter.build(
            self._findings(),
            self._guarded(self._engine.states, {}),
            checks=self._engine.checked,
            not_checked=self._left_out | self._engine.not_checked,
            complete=complete,
        )
        self._reporter.write(report)
        return report

    def _findings(self) -> tuple[Finding, ...]:
        return (*self._engine.findings, *self._own_findings)

    def _abort_if_asked(self) -> None:
        if self._config.on_hang != "abort" or not self._engine.is_hung or self._reporter.aborted:
            return
        self._reporter.aborted = True
        self._aborted_s = time.monotonic()
        self._publish()
        say("distdiag: the run hangs and --on-hang abort is set: its ranks are killed now\n")
        kill_families(process.pid for process in self._living())

    def _release_rank_0(self) -> None:
        """Let rank 0 go when another rank waits for it in vain: its exit must not be delayed."""
        if self._has_verdict or 0 not in self._attendance.ended:
            return
        states = self._engine.states()
        if not any(
            0 in call.group.ranks
            for rank in self._attendance.undisturbed
            for call in states[rank].waiting
        ):
            self._deserted_s = 0.0
            return
        now_s = time.monotonic()
        self._deserted_s = self._deserted_s or now_s
        if now_s - self._deserted_s > DESERTED_S:
            self._has_verdict = True
            self._reporter.save_verdict(self._findings())

    def _conclude(self) -> None:
        self._guarded(self._announce, None)
        report = self._publish(complete=True)
        self._guarded(lambda: self._reporter.show(report), None)
        self._reporter.release()
        self._reporter.save_verdict(self._findings())

    # When the monitor itself fails

    def _outlive(self) -> None:
        """Only wait until the ranks have ended, by their status pages and processes."""
        for rank in self._attendance.ranks:
            while (end := self._end_of(rank)) is None:
                time.sleep(IDLE_S)
            self._attendance.feed(end)
        self._attendance.settle(is_hung=False)

    def _end_of(self, rank: int) -> Finished | Exited | None:
        now_ns = time.monotonic_ns()
        try:
            status = read_status(self._run_dir.status(rank))
        except (OSError, DamagedFileError):
            is_gone = self._launcher.is_gone
        else:
            if status.finished:
                return Finished(rank=rank, seq=-1, time_ns=now_ns, exit_status=int(status.raised))
            is_gone = Process(status.pid, status.start_ticks).is_gone
        return Exited(rank=rank, seq=-1, time_ns=now_ns) if is_gone else None

    def _guarded(self, act: Callable[[], T], otherwise: T) -> T:
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - the report must exist even so (STYLE 4.11)
            _log.exception("the monitor failed")
            self._own_findings.append(crash_finding(error))
            return otherwise


def main(arguments: list[str]) -> int:
    """Run the monitor of a run directory and an attempt."""
    root, attempt = arguments
    run_dir = RunDir(Path(root), int(attempt))
    # What ends the ranks must not end the one who tells of it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(5)
    logging.raiseExceptions = False  # a full disk must not fill stderr
    handler = logging.FileHandler(run_dir.monitor_log, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.getLogger("distdiag").addHandler(handler)
    with suppress(OSError):
        write_atomically(run_dir.monitor_pid, str(os.getpid()).encode())
    launch_file = msgspec.json.decode(run_dir.launch.read_bytes(), type=LaunchFile)
    config = Config.from_json(msgspec.json.encode(launch_file.config))
    # The monitor of the attempt before this one must have finished its report.
    wait_for_pid_file(RunDir(run_dir.root, run_dir.attempt - 1).monitor_pid, PREDECESSOR_S)
    Monitor(run_dir, launch_file, config).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
