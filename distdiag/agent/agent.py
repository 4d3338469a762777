"""The part of distdiag that lives in a training process: it keeps the records of one rank."""

from __future__ import annotations

import _thread
import atexit
import json
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

import msgspec

from distdiag.agent.monitor_process import MonitorProcess
from distdiag.agent.rendezvous import Rendezvous, is_needed
from distdiag.config import Config
from distdiag.events.base import Frame, Phase
from distdiag.events.errors import UNDECODABLE, DamagedFileError, RankError
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
from distdiag.record.regular_file import read_regular
from distdiag.record.run_dir import Launch, RunDir, Verdict, open_run_dir, write_atomically
from distdiag.record.signals import Signal, Signals
from distdiag.record.status_page import DETACHED, FINISHED, StatusPage, read_status

BEAT_S: Final = 0.5
POLL_S: Final = 0.02
LAST_WORDS_S: Final = 3.0
"""A rank that raised waits so long for its peers' stacks to be taken."""
VERDICT_S: Final = 12.0
"""Rank 0 waits so long for the verdict after all other ranks have ended: a little longer than the
monitor waits for ranks that never came."""


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

    def __init__(
        self,
        launch: Launch,
        config: Config,
        command: tuple[str, ...],
        *,
        main_script: str | None,
    ) -> None:
        """Claim the run directory; nothing is observed yet.

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
        self._launch = launch
        self._config = config
        self._command = command
        self._monitor = MonitorProcess(self.run_dir)
        signals = Signals()
        with Guard(self._leave_unobserved):
            self._page, self.recorder = _open_records(
                self.run_dir, launch.rank, main_script, signals.before_sync
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
        rank = self._launch.rank
        if _is_observed(self.run_dir.status(rank)):  # another process is this rank
            raise error
        reason = f"its agent could not start: {type(error).__name__}: {error}"
        with suppress(OSError):
            write_atomically(self.run_dir.unobserved(rank), reason.encode())
        if self._launch.local_rank == 0 and len(self._launch.local_ranks) > 1:
            self._start_monitor()  # for the others
        raise error

    def start(self) -> None:
        """Begin to observe; the exit handler runs after those that the script registers."""
        launch = self._launch
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
        if launch.local_rank == 0:
            self._start_monitor()
        self.recorder.set_phase(Phase.SCRIPT)
        os.register_at_fork(after_in_child=self._let_go_in_child)
        atexit.register(self._at_exit)
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
            self._monitor.start(self._launch, self._command, self._config)
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
        if is_needed(self._launch) and not self._is_child:
            self._rendezvous.wait(LAST_WORDS_S)
        ack = self.run_dir.ack(self._launch.rank)
        while time.monotonic() < deadline and not ack.exists():
            if self._is_child or not self._monitor.is_alive or not self._has_living_peers():
                return
            time.sleep(POLL_S)

    def _has_living_peers(self) -> bool:
        return any(
            self._is_running(rank) for rank in self._launch.local_ranks if rank != self._launch.rank
        )

    def _is_running(self, rank: int) -> bool:
        try:
            status = read_status(self.run_dir.status(rank))
            os.kill(status.pid, 0)
        except (OSError, DamagedFileError):
            return False
        return not (status.finished or status.detached)

    def _at_exit(self) -> None:
        if self._is_child or self.recorder.closed:
            return
        exit_status = self.exit_status
        with Guard(partial(_warn_of, "at the end of the run")):
            try:
                # No monitor ends before its ranks. What they wrote is all there for another one,
                # and nobody may be left to start it: the launcher may end rank 0 because of us.
                if self._monitor.was_killed:
                    self._replace_monitor()
                self._finish(exit_status, self._exit_frames, self._exit_message)
            finally:
                if self._launch.rank == 0:
                    exit_status = self._final_status(exit_status)
        self._end_threads()
        if exit_status != self.exit_status:
            leave(exit_status)

    def will_exit(self, exit_status: int, error: SystemExit) -> None:
        """Note with which status the script asked to end, and where."""
        self.exit_status = exit_status
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
        verdict = self._wait_for_verdict()
        if verdict is None or exit_status != 0 or verdict.exit_status == 0:
            return exit_status
        if self._launch.attempt + 1 < self._launch.max_attempts:
            return exit_status  # a failure now would make the launcher run it all again
        _tell_launcher(verdict.summary)
        return verdict.exit_status

    def _wait_for_verdict(self) -> Verdict | None:
        may_start = True
        deadline = time.monotonic() + VERDICT_S
        while True:
            lives = self._monitor.is_alive
            try:
                return msgspec.json.decode(read_regular(self.run_dir.verdict), type=Verdict)
            except (OSError, *UNDECODABLE):
                if not lives and not may_start:
                    self._warn_not_judged("died")
                    return None
            if not lives:
                may_start = False
                self._replace_monitor()
                deadline = time.monotonic() + VERDICT_S
            elif self._has_living_peers():
                deadline = time.monotonic() + VERDICT_S
            elif time.monotonic() > deadline:
                self._warn_not_judged(f"has given no verdict within {VERDICT_S:.0f} s")
                return None
            time.sleep(POLL_S)

    def _replace_monitor(self) -> None:
        with suppress(OSError):  # then it is still dead a moment later
            self._monitor.start_again("was found dead at the end of the run")

    def _warn_not_judged(self, what: str) -> None:
        root = self.run_dir.root
        warn(
            f"the monitor {what}: THIS RUN WAS NOT JUDGED, its exit status says nothing of findings"
            f" (`distdiag analyze {root}` reads what was recorded)"
        )

    def _end_threads(self) -> None:
        self._stopping.set()
        for stopped in self._stopped:
            stopped.wait(0.2)

    def stop(self) -> None:
        """Observe no longer, and say so to the monitor; the script goes on alone."""
        self._imports.stop()
        for probe in reversed(self.probes):
            probe.uninstall()
        self.recorder.raise_flag(DETACHED)
        self.recorder.close()
        self._end_threads()
        atexit.unregister(self._at_exit)


def _open_records(
    run_dir: RunDir, rank: int, main_script: str | None, before_sync: Signal[[]]
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
            run_dir.folder, rank, page, main_script=main_script, before_sync=before_sync
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


def _tell_launcher(summary: str) -> None:
    """Leave the summary where torchelastic looks for the reason of a failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
    error = {"message": {"message": summary, "extraInfo": extra}}
    try:
        write_atomically(Path(path), json.dumps(error).encode())
    except OSError as problem:
        warn(f"the launcher's error file cannot be written: {problem}")
