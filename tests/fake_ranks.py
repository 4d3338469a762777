"""Ranks without torch: real processes that leave behind what an agent would, for fast tests."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from distdiag.config import Config
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import ProcessGroup, Signature
from distdiag.events.lifecycle import Finished, Raised, RankStarted, TorchLoaded
from distdiag.findings.finding import Report
from distdiag.findings.report_json import decode_report
from distdiag.record.recorder import Recorder
from distdiag.record.run_dir import Launch, LaunchFile, RunDir, Verdict, write_atomically
from distdiag.record.status_page import FINISHED, RAISED, StatusPage

REPOSITORY = Path(__file__).parents[1]
PRELUDE = "import os, sys, time\nfrom tests.fake_ranks import FakeRank\nrank = FakeRank()\n"


class FakeRank:
    """The agent of a rank, started as ``python script.py RUN_DIR ATTEMPT RANK WORLD``."""

    def __init__(self):
        root, attempt, rank, world = sys.argv[1:]
        self.run_dir = RunDir(Path(root), int(attempt))
        self.rank, self.world = int(rank), int(world)
        self.page = StatusPage(self.run_dir.status(self.rank))
        launch_file = msgspec.json.decode(self.run_dir.launch.read_bytes(), type=LaunchFile)
        config = Config.from_json(msgspec.json.encode(launch_file.config))
        self.recorder = Recorder(
            self.run_dir.folder, self.rank, self.page, kept_segments=config.keep_events
        )
        self.recorder.event(
            RankStarted,
            local_rank=self.rank,
            world_size=self.world,
            hostname="here",
            pid=os.getpid(),
            python="3",
            command=tuple(sys.argv),
            unix_ns=time.time_ns(),
        )
        self.recorder.event(TorchLoaded, torch="2.13.0", tap="dispatcher")
        self._next = 0
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self):
        while True:
            self.recorder.beat()
            time.sleep(0.2)

    def all_reduce(self, size=4, *, line=10, done=True, op="all_reduce"):
        """Record a collective of the whole world, made at a line of train.py."""
        group = ProcessGroup("0", "default_pg", tuple(range(self.world)), "gloo")
        signature = Signature(op, ((size,),), (), ("float32",), "sum")
        site = CallSite((Frame("train.py", line, "main"),))
        tables, recorder = self.recorder.tables, self.recorder
        number = tables.groups.get(group)
        if number is None:
            number = recorder.define_group(group, group)
        signature_number = tables.signatures.get(signature)
        if signature_number is None:
            signature_number = recorder.define_signature(signature, signature)
        known = tables.sites.get(site) or recorder.define_site(
            site, site, api=op, is_own_call=True, kept_alive=None
        )
        call = recorder.call(number, self._next, signature_number, known.number, False, None, op)
        self._next += 1
        recorder.state(call, "issued")
        if done:
            recorder.state(call, "waited")

    def finish(self, exit_status=0):
        """End as a script ends; rank 0 waits for the verdict and prints how long it took."""
        self.recorder.event(Finished, exit_status=exit_status)
        self.recorder.raise_flag(FINISHED)
        begun = time.monotonic()
        if self.rank == 0:
            while not self.run_dir.verdict.exists():
                time.sleep(0.01)
        self._end(exit_status, time.monotonic() - begun)

    def fail(self, message="boom", *, line=20, inside_torch=False, patience_s=3):
        """End by an exception that nobody caught, after at most 3 s for the dumps of the peers."""
        torch = (Frame("torch/distributed/distributed_c10d.py", 1, "all_reduce", False),)
        self.recorder.event(
            Raised,
            type="ValueError",
            message=message,
            frames=(*(torch if inside_torch else ()), Frame("train.py", line, "main")),
            traceback="Traceback …",
        )
        self.recorder.raise_flag(RAISED)
        begun = time.monotonic()
        while not self.run_dir.ack(self.rank).exists() and time.monotonic() - begun < patience_s:
            time.sleep(0.01)
        self._end(1, time.monotonic() - begun)

    def _end(self, exit_status, waited_s):
        with suppress(OSError):  # the disk may be full on purpose
            (self.run_dir.root / f"waited-{self.rank}").write_text(str(waited_s))
        os._exit(exit_status)


class FakeJob:
    """Ranks and their monitor. As a context manager it leaves no process behind.

    `is_monitored`: the monitor starts together with the ranks; else `start_monitor` starts it.
    """

    def __init__(
        self,
        root,
        bodies,
        *,
        attempt=0,
        launcher=None,
        monitor_code=None,
        is_monitored=True,
        **config,
    ):
        self.run_dir = RunDir(root, attempt)
        self.world = len(bodies)
        (self.run_dir.folder / "acks").mkdir(parents=True, exist_ok=True)
        self.config = Config(**config)
        self._bodies = bodies
        self._launcher = launcher or os.getpid()
        self._monitor_code = monitor_code
        self._is_monitored = is_monitored
        self.ranks = []
        self.monitor = None

    def __enter__(self):
        self._write_launch_file()
        for rank, body in enumerate(self._bodies):
            if body is not None:
                self.ranks.append(self._start_rank(rank, body))
        if self._is_monitored:
            self.start_monitor()
        return self

    def _write_launch_file(self):
        launch = Launch(
            rank=0,
            local_rank=0,
            world_size=self.world,
            local_world_size=self.world,
            attempt=self.run_dir.attempt,
            max_attempts=1,
            parent_pid=self._launcher,
            identity="test",
            started_s=time.time(),
        )
        launch_file = LaunchFile(
            launch=launch,
            command=("train.py",),
            config=json.loads(self.config.to_json()),
            cwd=str(self.run_dir.root),
        )
        write_atomically(self.run_dir.launch, msgspec.json.encode(launch_file))

    def _start_rank(self, rank, body):
        script = self.run_dir.folder / f"rank{rank}.py"
        script.write_text(PRELUDE + body)
        return subprocess.Popen(
            [
                sys.executable,
                str(script),
                str(self.run_dir.root),
                str(self.run_dir.attempt),
                str(rank),
                str(self.world),
            ],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )

    def start_monitor(self):
        program = ["-c", self._monitor_code] if self._monitor_code else ["-m", "distdiag.monitor"]
        self.monitor = subprocess.Popen(
            [sys.executable, *program, str(self.run_dir.root), str(self.run_dir.attempt)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            start_new_session=True,
        )

    def wait(self, timeout_s=60) -> str:
        """Wait for the monitor to end by itself; return what it wrote to stderr."""
        _, stderr = self.monitor.communicate(timeout=timeout_s)
        return stderr

    def report(self) -> Report:
        return decode_report(self.run_dir.report.read_bytes())

    def verdict(self) -> Verdict:
        return msgspec.json.decode(self.run_dir.verdict.read_bytes(), type=Verdict)

    def until(self, is_true, timeout_s=60):
        """Wait until something is true."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline, "it did not become true in time"
            time.sleep(0.02)

    def until_report(self, is_true, timeout_s=60):
        """Wait until the report on disk says something."""
        path = self.run_dir.report
        self.until(lambda: path.exists() and is_true(self.report()), timeout_s)

    def __exit__(self, *_):
        for process in filter(None, (*self.ranks, self.monitor)):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            if process.stderr:
                process.stderr.close()
