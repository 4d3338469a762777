"""A real process with the post-mortem probe of a rank, to be looked at from outside."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from distdiag.record.run_dir import RunDir

REPOSITORY = Path(__file__).parents[2]
MOST_S = 60.0
"""A process that has said that it is ready is at the next line long before."""

PRELUDE = """
import _thread, ctypes, faulthandler, os, sys, threading, time
from pathlib import Path
sys.path.insert(0, {repository!r})
from distdiag.probes.process.post_mortem import PostMortem
from distdiag.record.recorder import Recorder
from distdiag.record.run_dir import RunDir
from distdiag.record.status_page import StatusPage

run_dir = RunDir(Path(sys.argv[1]), 0)
recorder = Recorder(run_dir.folder, 0, StatusPage(run_dir.status(0)))
probe = PostMortem(recorder, run_dir)
probe.install()

def beat():
    while True:
        recorder.beat()
        probe.beat()
        time.sleep(0.1)

_thread.start_new_thread(beat, ())
threading.Thread(target=time.sleep, args=(100,), name="background", daemon=True).start()
while not run_dir.stack_signal(0).exists():
    time.sleep(0.01)
time.sleep(0.3)

def wait_inside():
    print("ready", flush=True)
    {body}

wait_inside()
"""


def dump_at(source, process, line):
    """Dump until the main thread has got to this line of its function; return the stacks."""
    deadline = time.monotonic() + MOST_S
    while True:
        stacks = source.dump(process.pid, 0, 20.0)
        at = stacks.threads[0].frames[0].line if stacks.threads else None
        if at == line or stacks.error or time.monotonic() > deadline:
            return stacks


@contextmanager
def observed_script(root, body):
    """Run a body of one line (or more, indented by four) in a process that is rank 0 of a run."""
    run_dir = RunDir(root / "run", 0)
    run_dir.folder.mkdir(parents=True)
    script = root / "train.py"
    script.write_text(PRELUDE.format(body=body, repository=str(REPOSITORY)))
    with subprocess.Popen(
        [sys.executable, script, run_dir.root],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            yield process, run_dir, script
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
