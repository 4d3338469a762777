"""Small sick programs, run until they are looked at."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress


@contextmanager
def running(code, *arguments, **options):
    """Run code that prints ``ready`` right before it does what it is for."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until(look, is_true, tries=1000):
    """Look until something is true (the process is on its way there); return the last look."""
    seen = look()
    while not is_true(seen):
        tries -= 1
        assert tries > 0, seen
        signal.sigtimedwait((), 0.01)
        seen = look()
    return seen
