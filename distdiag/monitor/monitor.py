"""Watches the ranks of one node: ``python -m distdiag.monitor RUN_DIR ATTEMPT``.

A process of its own: it follows what the ranks leave behind, takes their stacks when something goes
wrong, and tells of it. It outlives killed and stuck ranks, and ends by itself when they are gone.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

import msgspec

from distdiag.checks import Check, load_checks
from distdiag.config import Config
from distdiag.dumps.process.proc import wait_for_pid_file
from distdiag.engine import Engine
from distdiag.engine.aligner import DESELECTED
from distdiag.events.base import Event
from distdiag.events.lifecycle import Monitored, NodeLost
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.findings.finding import Finding, Report, Severity
from distdiag.findings.store import with_earlier
from distdiag.monitor.dump_transport import DumpTransporter
from distdiag.monitor.forwarding import ForwardingMonitor
from distdiag.monitor.local_ranks import LocalRanks
from distdiag.monitor.peers import listen_for_others
from distdiag.monitor.source_state import SourceLook
from distdiag.monitor.takeover import Takeover
from distdiag.record.guard import Guard
from distdiag.record.regular_file import read_regular
from distdiag.record.run_dir import LaunchFile, RunDir, write_atomically
from distdiag.record.user_code import main_script
from distdiag.record.wire import Interner
from distdiag.reports import one_line
from distdiag.reports.builder import RunReporter, crash_finding, say
from distdiag.transports.frames import Orders
from distdiag.transports.journal import Journal
from distdiag.views.files import Race

T = TypeVar("T")

_log = logging.getLogger("distdiag.monitor")  # this module runs as ``__main__``

UNKILLABLE_S: Final = 10.0
"""A rank that was killed may stay, in the kernel, for ever: so long it is waited for."""
DESERTED_S: Final = 0.5
REWRITE_EVERY_S: Final = 5.0
"""The report is written again this often, so that it is fresh if the monitor itself is killed."""
HANG_DUMP_S: Final = 10.0
PREDECESSOR_S: Final = 5.0


MOST_NATIVE: Final = 8
"""Each rank stands still while it is read, and ranks that hang together mostly look alike."""


class NativePass:
    """A second look at hung ranks, with native frames: slow, so on a thread of its own, once."""

    def __init__(self, look: Callable[[Iterable[int]], tuple[Stacks, ...]]) -> None:
        """Take the stacks by `look`, which is given the ranks."""
        self._look = look
        self._thread: threading.Thread | None = None
        self._seen: tuple[Stacks, ...] = ()

    def start(self, ranks: Iterable[int]) -> None:
        """Begin, unless it was begun before."""
        if self._thread is None:
            few = sorted(ranks)[:MOST_NATIVE]
            # A daemon: a reading that never ends must not keep the monitor from ending.
            self._thread = threading.Thread(target=self._run, args=(few,), daemon=True)
            self._thread.start()

    def _run(self, ranks: list[int]) -> None:
        self._seen = self._look(ranks)

    def poll(self) -> tuple[Stacks, ...]:
        """Return the stacks when they are there, once."""
        seen, self._seen = self._seen, ()
        return seen


class Monitor:
    """The watch over one attempt of a run, on the node of rank 0: it compares all ranks."""

    def __init__(
        self, run_dir: RunDir, launch_file: LaunchFile, config: Config, before: Takeover
    ) -> None:
        """Prepare to watch; nothing is read of the ranks yet."""
        self._run_dir = run_dir
        self._config = config
        interner = Interner()
        self._local = LocalRanks(run_dir, launch_file, config, interner)
        self._native = NativePass(self._local.see_native)
        script = main_script(launch_file.command, launch_file.cwd)
        self._source = SourceLook(script, launch_file.cwd, min(self._local.ranks))
        self._journal = Journal(run_dir.journal)
        self._others = listen_for_others(run_dir, launch_file.launch, interner)
        self._transporter = DumpTransporter(
            run_dir.folder,
            config.dump_transport,
            self._local.ranks,
            self._others.source,
            interner,
        )
        ranks = RankSet({*self._local.ranks, *self._others.ranks})
        self._own_findings = list(before.findings())
        self._earlier = before.reported()
        catalogue: Mapping[str, type[Check[Any]]] = self._guarded(load_checks, MappingProxyType({}))
        self._growing = {code for code, check in catalogue.items() if Race in check.views}
        selects = config.selection.selects
        self._left_out = {code: DESELECTED.reason for code in catalogue if not selects(code)}
        self._engine = Engine(
            [check() for code, check in catalogue.items() if selects(code)],
            ranks,
            hang_timeout_s=config.hang_timeout_s,
            rules=config.plan,
            numerics=config.numerics,
            only_start=config.profile == "light",
        )
        self._status = self._engine.rank_status
        self._reporter = RunReporter(run_dir, launch_file, config, self._status)
        self._reporter.problem = self._others.problem
        self._announced: set[tuple[object, ...]] = set()
        for found in self._earlier:
            self._announced |= {self._news_of(found), (False, *self._news_of(found)[1:])}
        for event in before.seen(interner):
            self._engine.feed(event)
        self._has_verdict = False
        self._written_s = self._aborted_s = self._deserted_s = 0.0

    def run(self) -> None:
        """Watch until all ranks have ended, and leave the report and the verdict."""
        if not self._guarded(self._attend, False):
            if not self._run_dir.folder.is_dir():
                say(f"distdiag: {self._run_dir.root} was removed: this run is judged no further\n")
                return
            self._outlive()
        self._conclude()

    def _attend(self) -> bool:
        self._engine.feed(self._local.clock())
        while True:
            if self._run_dir.gives_way:
                return True
            has_news = self._look()
            if self._is_over():
                break
            self._local.wait(self._status.gone, has_news=has_news)
        for event in self._others.end():
            self._take_in(event)
        self._engine.finish()
        self._note("ended")
        return True

    def _look(self) -> bool:
        """Take in what is new and act on it; return whether anything was."""
        has_news = False
        for event in self._events():
            has_news = has_news or event.seq >= 0
            self._reporter.feed(event)
            self._engine.feed(event)
        self._reporter.pids = self._local.pids
        self._see_last_stacks()
        is_early = self._others.is_early(self._local.pids, self._status)
        if not (self._status.is_aborted or is_early):
            self._engine.tick(self._note("looked"), self._others.out_of_sight)
            is_urgent = self._config.on_hang == "abort"
            timeout_s = self._engine.evidence_s if is_urgent else HANG_DUMP_S
            self._see_stacks(self._engine.evidence_wanted, timeout_s)
        self._engine.settle()
        self._announce()
        self._act_on_hang()
        self._release_rank_0()
        return has_news

    def _events(self) -> Iterator[Event]:
        for event in (*self._native.poll(), *self._source.poll(), *self._local.poll()):
            if event.seq < 0:
                self._journal.write(event)
            yield event
        for event in self._others.poll():
            self._transporter.saw(event)
            if isinstance(event, NodeLost):
                self._journal.write(event)
            yield event
        self._reporter.lost = self._others.lost
        yield from self._transporter.poll()

    def _is_over(self) -> bool:
        over = self._status.over
        now_s = time.monotonic()
        if self._status.is_over:
            return True
        if self._aborted_s and now_s - self._aborted_s > UNKILLABLE_S:
            return True
        return self._local.are_over(over) and not self._others.may_go_on(self._status)

    def _see_last_stacks(self) -> None:
        """When a rank raised or died, see where its peers are before the launcher ends them."""
        if not self._status.is_aborted:
            for event in self._local.see_last(self._status):
                self._take_in(event)
        for rank in self._local.unanswered(self._status):
            self._reporter.acknowledge(rank)

    def _see_stacks(self, ranks: Iterable[int], timeout_s: float) -> None:
        """Take the evidence of a hang on this node, and have it brought from the others."""
        new = self._transporter.ask(ranks)
        events = tuple(self._local.see(new, timeout_s)) if new else ()
        for event in events:
            self._journal.write(event)
        for event in self._transporter.pass_on(events):
            self._engine.feed(event)

    def _take_in(self, event: Event) -> None:
        self._journal.write(event)
        self._engine.feed(event)

    def _note(self, act: Literal["looked", "aborted", "ended"]) -> int:
        """Keep what this monitor does, so that it can be led through the run again."""
        now_ns = time.monotonic_ns()
        event = Monitored(rank=min(self._local.ranks), seq=-1, time_ns=now_ns, act=act)
        self._journal.write(event)
        if act == "aborted":
            self._engine.feed(event)
        return now_ns

    def _announce(self) -> None:
        for note in self._engine.take_withdrawn():
            news = self._news_of(note)
            if (True, *news[1:]) in self._announced:
                say(f"{one_line(note)}\n")
                self._announced.discard((True, *news[1:]))  # it may become true again
                self._written_s = 0.0
        counting = self._reporter.gate.standing(self._findings())
        findings = {self._news_of(finding): finding for finding in counting}
        new = {news: findings[news] for news in findings if news not in self._announced}
        if not new and time.monotonic() - self._written_s < REWRITE_EVERY_S:
            return
        self._publish()
        for news, finding in new.items():
            # What is softened later is no news; what turns out to be worse than a note is.
            self._announced |= {news, (False, *news[1:])}
            if not self._config.quiet or finding.severity is Severity.ERROR:
                say(f"{one_line(finding)}\n")

    def _publish(self, *, complete: bool = False) -> Report:
        self._written_s = time.monotonic()
        self._reporter.dump_transport = self._transporter.way
        self._reporter.unobserved = self._engine.unobserved
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
        found = self._engine.findings
        if self._engine.has_gap:  # the monitor before this one has seen what is not kept
            found = with_earlier(found, self._earlier)
        return (*found, *self._own_findings)

    def _act_on_hang(self) -> None:
        if not self._engine.is_hung or self._status.is_aborted:
            return
        if self._config.on_hang != "abort":
            self._native.start(self._local.ranks)
            return
        self._note("aborted")
        self._aborted_s = time.monotonic()
        self._publish()
        say("distdiag: the run hangs and --on-hang abort is set: its ranks are killed now\n")
        self._others.want(Orders(abort=True))
        self._local.kill(self._status.gone)

    def _release_rank_0(self) -> None:
        """Let rank 0 go when its exit must not be delayed: another rank waits for it, or it failed.

        A launcher ends the other ranks of a job as soon as one has failed, wherever they are.
        """
        if self._has_verdict or 0 not in self._status.ended:
            return
        states = self._engine.states()
        has_failed = self._status.exit_status.get(0, 0) != 0
        if not has_failed and not any(
            0 in call.group.ranks
            for rank in self._status.undisturbed
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
        if self._run_dir.gives_way:
            # The monitor of the ranks that this process starts writes the report from now on.
            self._reporter.save_verdict(self._findings())
            self._close()
            return
        self._guarded(self._announce, None)
        report = self._publish(complete=True)
        self._guarded(lambda: self._reporter.show(report), None)
        self._reporter.release()
        self._reporter.save_verdict(self._findings())
        # Rank 0 waits for the verdict, and for no longer than some seconds.
        self._guarded(lambda: self._reporter.show(report, slow=True), None)
        self._close()

    def _close(self) -> None:
        self._others.close()
        self._transporter.close()

    def _outlive(self) -> None:
        """Only wait until the ranks of this node have ended, after the monitor itself failed."""
        for end in self._local.ends():
            self._status.feed(end)
        self._status.settle(is_hung=False)

    def _news_of(self, finding: Finding) -> tuple[object, ...]:
        """Return what makes a finding worth a line: a race grows rank by rank, in silence."""
        is_alarm = finding.severity is not Severity.INFO
        identity = finding.identity
        return (is_alarm, *(identity[:2] if finding.code in self._growing else identity))

    def _guarded(self, act: Callable[[], T], otherwise: T) -> T:
        with Guard(self._note_failure):
            return act()
        return otherwise

    def _note_failure(self, error: Exception) -> None:
        """Say in the report, which must exist even so, that the monitor itself failed."""
        _log.error("the monitor failed", exc_info=error)
        self._own_findings.append(crash_finding(error))


class _LogFile(logging.FileHandler):
    """A log that is left out when its folder is not there any more."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, if that is possible."""
        with suppress(OSError):
            super().emit(record)


def main(arguments: list[str]) -> int:
    """Run the monitor of a run directory and an attempt; what befell those before it may follow."""
    root, attempt, *deaths = arguments
    run_dir = RunDir(Path(root), int(attempt))
    # What ends the ranks must not end the one who tells of it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(5)
    logging.raiseExceptions = False  # a full disk must not fill stderr
    handler = _LogFile(run_dir.monitor_log, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.getLogger("distdiag").addHandler(handler)
    with suppress(OSError):
        write_atomically(run_dir.monitor_pid, str(os.getpid()).encode())
    try:
        launch_file = msgspec.json.decode(read_regular(run_dir.launch), type=LaunchFile)
    except FileNotFoundError:  # somebody has removed the folder since
        _log.warning("there is no run in %s", run_dir.folder)
        return 1
    config = Config.from_json(msgspec.json.encode(launch_file.config))
    # The monitor of the attempt before this one must have finished its report.
    wait_for_pid_file(RunDir(run_dir.root, run_dir.attempt - 1).monitor_pid, PREDECESSOR_S)
    role = Monitor if 0 in launch_file.launch.local_ranks else ForwardingMonitor
    role(run_dir, launch_file, config, Takeover(run_dir, tuple(deaths))).run()
    return 0
