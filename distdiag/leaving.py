"""The end of a process, without what the interpreter would still do."""

from __future__ import annotations

import os
import sys


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
