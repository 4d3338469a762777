"""The part of distdiag that lives in a training process: it keeps the records of one rank."""

from __future__ import annotations

import _thread
import atexit
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from distdiag.agent.monitor_process import MonitorProcess
from distdiag.agent.rendezvous import Rendezvous, is_needed
from distdiag.agent.verdict import (
    POLL_S,
    living,
    newest_verdict,
    replace_monitor,
    tell_launcher,
)
from distdiag.config import Config
from distdiag.events.base import Frame, Phase
from distdiag.events.errors import DamagedFileError, RankError
from distdiag.events.lifecycle import Finished, ProbeDisabled, RankStarted
from distdiag.probes.base import AnyCallable, Probe
from distdiag.probes.call_sites import caller, frames_of
from distdiag.probes.catalogue import ProbeSpec, Wiring, find_probes
from distdiag.probes.patching.in_place import all_at_once
from distdiag.probes.patching.post_import import ImportHook
from distdiag.probes.process.exceptions import ExceptionProbe
from distdiag.probes.process.post_mortem import PostMortem
from distdiag.record.guard import Guard, guarded, warn
from distdiag.record.recorder import Recorder
from distdiag.record.run_dir import Launch, RunDir, open_run_dir, write_atomically
from distdiag.record.signals import Signal, Signals
from distdiag.record.status_page import DETACHED, FINISHED, StatusPage, read_status

BEAT_S: Final = 0.5
LAST_WORDS_S: Final = 3.0
"""A rank that raised waits so long for its peers' stacks to be taken."""


def leave(exit_status: int) -> None:
    """End the process with another status than the interpreter would."""
    logging = sys.modules.get("logging")
    if logging is not None:
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(exit_status)


class HardExit(Probe):
    """Tells that a script ends by `os._exit`, which runs no exit handler: status and line."""

    name: ClassVar[str] = "hard-exit"

    def __init__(
        self, recorder: Recorder, *, before_exit: Callable[[int, tuple[Frame, ...]], None]
    ) -> None:
        """Call `before_exit` with status and stack, unless the end was reported already."""
        super().__init__(recorder)
        self._before_exit = before_exit

    def _install(self) -> None:
        self._patches.wrap(os, "_exit", self._leaving)

    def _leaving(self, original: AnyCallable) -> AnyCallable:
        def leave(status: int) -> None:
            # In a forked child the recorder is closed: its end is not that of the rank.
            if not self.is_off:
                with self.guard:
                    frames = frames_of(caller(), self.recorder.main_script)
                    self._before_exit(status & 0xFF, frames)
            original(status)

        return leave


class RankAgent:
    """Observes this process from `start` until it ends or `stop` is called."""

    current: ClassVar[RankAgent | None] = None
    _ends_process: ClassVar[bool] = False

    def __init__(
        self,
        launch: Launch,
        config: Config,
        command: tuple[str, ...],
        *,
        main_script: str | None,
        starts_monitor: bool | None = None,
        awaits_verdict: bool | None = None,
    ) -> None:
        """Claim the run directory; nothing is observed yet.

        The first rank of a node starts the monitor, and rank 0 waits for the verdict at its end,
        unless somebody else does.

        Raises:
            RankError: another process is this rank of the run.
            UsageError: the run directory cannot be used.

        """
        self.exit_status = 0
        self._exit_frames: tuple[Frame, ...] = ()
        self._exit_message = ""
        self.run_dir = open_run_dir(
            config.run_dir, launch, overwrite=config.overwrite, kept_runs=config.keep_runs
        )
        self.launch = launch
        self.config = config
        self._starts_monitor = launch.local_rank == 0 if starts_monitor is None else starts_monitor
        self._awaits_verdict = launch.rank == 0 if awaits_verdict is None else awaits_verdict
        self._command = command
        self._monitor = MonitorProcess(self.run_dir)
        signals = Signals()
        with Guard(self._leave_unobserved):
            self._page, self.recorder = _open_records(
                self.run_dir,
                launch.rank,
                main_script,
                signals.before_sync,
                kept_segments=config.keep_events,
            )
        self.exceptions = ExceptionProbe(self.recorder, after_raise=self.wait_for_last_words)
        self._post_mortem = PostMortem(self.recorder, self.run_dir)
        self.probes: list[Probe] = [
            self.exceptions,
            self._post_mortem,
            HardExit(self.recorder, before_exit=self._finish),
        ]
        self._specs = find_probes()
        self._wiring = Wiring(self.recorder, signals, config)
        self._imported: set[str] = set()
        self._imports = ImportHook(
            {name for spec in self._specs for name in spec.needs}, self._on_import
        )
        self._stopping = threading.Event()
        self._stopped: list[threading.Event] = []
        self._rendezvous = Rendezvous(self.run_dir, launch, self._stopping)
        self._is_child = False

    def _leave_unobserved(self, error: Exception) -> None:
        """Tell the monitor that this rank runs and is not observed: nobody may miss its records.

        Raises:
            Exception: why it is not observed.

        """
        rank = self.launch.rank
        if _is_observed(self.run_dir.status(rank)):  # another process is this rank
            raise error
        reason = f"its agent could not start: {type(error).__name__}: {error}"
        with suppress(OSError):
            write_atomically(self.run_dir.unobserved(rank), reason.encode())
        if self._starts_monitor and len(self.launch.local_ranks) > 1:
            self._start_monitor()  # for the others
        raise error

    def start(self) -> None:
        """Begin to observe; the exit handler runs after those that the script registers."""
        launch = self.launch
        self.recorder.event(
            RankStarted,
            local_rank=launch.local_rank,
            world_size=launch.world_size,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            python=platform.python_version(),
            command=self._command,
            unix_ns=time.time_ns(),
            attempt=launch.attempt,
        )
        if self._starts_monitor:
            self._start_monitor()
        self.recorder.set_phase(Phase.SCRIPT)
        os.register_at_fork(after_in_child=self._let_go_in_child)
        if not RankAgent._ends_process:
            RankAgent._ends_process = True
            atexit.register(_end_of_process)
        self._start_thread(self._beat)
        if is_needed(launch):
            self._start_thread(self._meet)
        with self._wrapping():
            for probe in self.probes:
                probe.install()
            self._on_import("")  # some wait for nothing
            self._imports.start()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that is observed."""
        return self._is_child

    def _start_thread(self, run: Callable[[], None]) -> None:
        stopped = threading.Event()
        self._stopped.append(stopped)

        def run_and_tell() -> None:
            try:
                run()
            finally:
                stopped.set()

        # Not a threading.Thread: the script must not find it among its own threads.
        _thread.start_new_thread(run_and_tell, ())

    def _meet(self) -> None:
        # Otherwise this node is observed by itself only.
        with Guard(partial(_warn_of, "the monitors of the nodes cannot meet")):
            self._rendezvous.pass_address_on()

    def _start_monitor(self) -> None:
        try:
            self._monitor.start(self.launch, self._command, self.config)
        except OSError as error:
            warn(f"the monitor cannot be started, there will be no report: {error}")

    def _on_import(self, name: str) -> None:
        self._imported.add(name)
        ready = [spec for spec in self._specs if self._imported.issuperset(spec.needs)]
        with self._wrapping():
            for spec in ready:
                if spec in self._specs:  # installing one may import what another one waits for
                    self._specs.remove(spec)
                    self._install(spec)

    def _wrapping(self) -> AbstractContextManager[None]:
        return all_at_once(Guard(partial(self._miss, "functions of C")))

    def _install(self, spec: ProbeSpec) -> None:
        probes: Sequence[Probe] = ()
        with Guard(partial(self._miss, spec.name)):  # another torch than we know
            probes = spec.make(self._wiring)
        for probe in probes:
            probe.install()
            self.probes.append(probe)

    def _miss(self, probe: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.recorder.event(ProbeDisabled, probe=probe, reason=reason)

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_S):
            self.recorder.beat()
            self._post_mortem.beat()
            self._monitor.let_trace_us()

    def _let_go_in_child(self) -> None:
        # A forked child shares the mapped files: there must never be two writers.
        self._is_child = True
        self.recorder.abandon()

    def wait_for_last_words(self) -> None:
        """Give the monitor a moment to take the stacks of the peers, which will be killed soon."""
        deadline = time.monotonic() + LAST_WORDS_S
        if is_needed(self.launch) and not self._is_child:
            self._rendezvous.wait(LAST_WORDS_S)
        ack = self.run_dir.ack(self.launch.rank)
        while time.monotonic() < deadline and not ack.exists():
            has_peers = living(self.run_dir, but=self.launch.rank)
            if self._is_child or not self._monitor.is_alive or not has_peers:
                return
            time.sleep(POLL_S)

    def end(self) -> None:
        """Write the end down; who awaits the verdict leaves with the status that it asks for."""
        if self._is_child or self.recorder.closed:
            return
        exit_status = self.exit_status
        with Guard(partial(_warn_of, "at the end of the run")):
            try:
                # No monitor ends before its ranks. What they wrote is all there for another one,
                # and nobody may be left to start it: the launcher may end rank 0 because of us.
                if self._monitor.was_killed:
                    replace_monitor(self._monitor)
                self._finish(exit_status, self._exit_frames, self._exit_message)
            finally:
                if self._awaits_verdict:
                    exit_status = self._final_status(exit_status)
        self._end_threads()
        if exit_status != self.exit_status:
            leave(exit_status)

    def will_exit(self, error: SystemExit) -> None:
        """Note with which status the script asked to end, and where."""
        self.exit_status = _exit_status(error.code)
        self._exit_frames, self._exit_message = self.exceptions.read_exit(error)

    def _finish(self, exit_status: int, frames: tuple[Frame, ...] = (), message: str = "") -> None:
        recorder = self.recorder
        if exit_status == 0:
            frames = ()
        try:
            for probe in self.probes:
                guarded(probe.flush, f"the end of the probe {probe.name}")
        finally:
            # A signal handler of the script may have ended it in the middle of the above.
            recorder.set_phase(Phase.FINISHED)
            recorder.event(Finished, exit_status=exit_status, frames=frames, message=message)
            recorder.beat()
            recorder.raise_flag(FINISHED)
            recorder.close()

    def _final_status(self, exit_status: int) -> int:
        verdict = newest_verdict(self.run_dir)
        if verdict is None or exit_status != 0 or verdict.exit_status == 0:
            return exit_status
        if self.launch.attempt + 1 < self.launch.max_attempts:
            return exit_status  # a failure now would make the launcher run it all again
        tell_launcher(verdict.summary)
        return verdict.exit_status

    def _end_threads(self) -> None:
        self._stopping.set()
        for stopped in self._stopped:
            stopped.wait(0.2)

    def stop(self) -> None:
        """Observe no longer, and say so to the monitor; the script goes on alone."""
        self.recorder.raise_flag(DETACHED)
        self.make_way()

    def make_way(self) -> None:
        """Observe no longer: another agent does, of the rank that this process becomes."""
        self._imports.stop()
        for probe in reversed(self.probes):
            probe.uninstall()
        self.recorder.close()
        if not self._is_child:
            self._end_threads()


def _end_of_process() -> None:
    # Registered once, before what the script registers: it is called last, whoever observes then.
    if RankAgent.current is not None:
        RankAgent.current.end()


def _exit_status(code: object) -> int:
    """Return the status that Python ends with for ``sys.exit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _open_records(
    run_dir: RunDir,
    rank: int,
    main_script: str | None,
    before_sync: Signal[[bool]],
    *,
    kept_segments: int,
) -> tuple[StatusPage, Recorder]:
    """Create the files of a rank; where one of them cannot be made, none is left behind."""
    path = run_dir.status(rank)
    try:
        page = StatusPage(path)
    except FileExistsError:
        if not _is_observed(path):
            raise
        raise RankError(
            f"another process is rank {rank} of the run in {run_dir.root} already"
        ) from None
    with ExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)
        recorder = Recorder(
            run_dir.folder,
            rank,
            page,
            main_script=main_script,
            before_sync=before_sync,
            kept_segments=kept_segments,
        )
        undo.pop_all()
    return page, recorder


def _warn_of(what: str, error: Exception) -> None:
    warn(f"{what}: {type(error).__name__}: {error}")


def _is_observed(status: Path) -> bool:
    """Say whether a process has begun to write this status page: anything else may lie there."""
    try:
        read_status(status)
    except (OSError, DamagedFileError):
        return False
    return True
