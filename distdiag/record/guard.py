"""Runs the parts of distdiag whose failure must not end the script, and says what failed."""

from __future__ import annotations

import sys
from collections.abc import Callable

from distdiag.events.errors import DistdiagError


def warn(message: str) -> None:
    """Say one line to the user, on stderr, whoever may have closed it."""
    try:
        sys.stderr.write(f"distdiag: {' '.join(message.split())}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return


def unobserved(purpose: str, error: Exception) -> None:
    """Say why the script goes on without being observed."""
    kind = "" if isinstance(error, DistdiagError) else f"{type(error).__name__}: "
    warn(f"{purpose} failed, the script runs unobserved: {kind}{error}")


def guarded(action: Callable[[], None], purpose: str) -> None:
    """Run a part of the tool whose failure must not end the script."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 (said to the user, and the script goes on)
        unobserved(purpose, error)
