"""Asks the background thread of a rank for something, by a file that the thread looks for.

The thread needs the GIL. Where that is held for ever, the thread's beat stands still and nobody is
asked.
"""

import time
from typing import Final, Literal

from distdiag.events.errors import DamagedFileError
from distdiag.record.run_dir import RunDir, write_atomically
from distdiag.record.status_page import read_status

POLL_S: Final = 0.01
STUCK_NS: Final = 3_000_000_000
"""The thread beats twice a second: it waits for the GIL, or stands still, if it has not so long."""


def is_answered(
    run_dir: RunDir, rank: int, what: Literal["stacks", "flight"], deadline: float
) -> bool:
    """Ask, and wait for the answer until `deadline`, a moment of the monotonic clock.

    Raises:
        OSError: the request cannot be written.

    """
    try:
        beat_ns = read_status(run_dir.status(rank)).beat_ns
    except (FileNotFoundError, DamagedFileError):
        return False
    if time.monotonic_ns() - beat_ns > STUCK_NS:
        return False
    wanted = run_dir.wanted(rank, what)
    write_atomically(wanted, b"")
    while wanted.exists():  # the thread removes it when all is written
        if time.monotonic() > deadline:
            wanted.unlink(missing_ok=True)
            return False
        time.sleep(POLL_S)
    return True
