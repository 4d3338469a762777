"""What a run came to: whoever started it waits for that at the end, and takes it for its status."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from distdiag.agent.monitor_process import MonitorProcess
from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.record.guard import warn
from distdiag.record.regular_file import read_regular
from distdiag.record.run_dir import RunDir, Verdict, attempts_of, write_atomically
from distdiag.record.status_page import read_status

POLL_S: Final = 0.02
VERDICT_S: Final = 12.0
"""The verdict is waited for so long after all other ranks have ended: a little longer than the
monitor waits for ranks that never came."""


def living(run_dir: RunDir, *, but: int = -1) -> bool:
    """Say whether a rank of this node that has begun still runs, `but` for one."""
    own = run_dir.status(but)
    return any(is_running(page) for page in run_dir.statuses() if page != own)


def is_running(page: Path) -> bool:
    """Say whether the rank of this status page runs and is observed."""
    try:
        status = read_status(page)
        os.kill(status.pid, 0)
    except (OSError, DamagedFileError):
        return False
    return not (status.finished or status.detached)


def newest_verdict(run_dir: RunDir) -> Verdict | None:
    """Wait for the verdict of the last attempt of a run; None if there is none."""
    newest = RunDir(run_dir.root, max(attempts_of(run_dir.root), default=run_dir.attempt))
    return wait_for_verdict(newest, MonitorProcess(newest))


def wait_for_verdict(run_dir: RunDir, monitor: MonitorProcess) -> Verdict | None:
    """Wait until the monitor has judged the run; None, and a line on stderr, if it does not."""
    may_start = True
    deadline = time.monotonic() + VERDICT_S
    while True:
        lives = monitor.is_alive
        try:
            return msgspec.json.decode(read_regular(run_dir.verdict), type=Verdict)
        except (OSError, *UNDECODABLE):
            if not lives and not may_start:
                _warn_not_judged(run_dir, "died")
                return None
        if not lives:
            may_start = False
            replace_monitor(monitor)
            deadline = time.monotonic() + VERDICT_S
        elif living(run_dir):
            deadline = time.monotonic() + VERDICT_S
        elif time.monotonic() > deadline:
            _warn_not_judged(run_dir, f"has given no verdict within {VERDICT_S:.0f} s")
            return None
        time.sleep(POLL_S)


def replace_monitor(monitor: MonitorProcess) -> None:
    """Start another one for a dead one: it can judge what the ranks wrote from the beginning."""
    with suppress(OSError):  # then it is still dead a moment later
        monitor.start_again("was found dead at the end of the run")


def _warn_not_judged(run_dir: RunDir, what: str) -> None:
    root = run_dir.root
    warn(
        f"the monitor {what}: THIS RUN WAS NOT JUDGED, its exit status says nothing of findings"
        f" (`distdiag analyze {root}` reads what was recorded)"
    )


def tell_launcher(summary: str) -> None:
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
