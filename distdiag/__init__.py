"""Diagnostics for distributed PyTorch training: why a run is wrong or stuck."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from distdiag.record.logged import log
from distdiag.record.marks import gathers_sequence, splits_sequence

if TYPE_CHECKING:
    from distdiag import sequence as sequence

__all__ = ["attach", "detach", "gathers_sequence", "log", "sequence", "splits_sequence"]


def __getattr__(name: str) -> ModuleType:
    # Imports torch, which is left to who needs it.
    if name == "sequence":
        import importlib

        return importlib.import_module("distdiag.sequence")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def attach(**options: object) -> None:
    """Begin to observe this process, for scripts that cannot be started with ``-m distdiag.check``.

    Call it on every rank, before `init_process_group`. The options are those of the command line
    with ``_`` for ``-``: ``attach(run_dir="runs/a", on_hang="abort")``. A second call changes
    nothing.

    It never raises: where an option is wrong, the run directory cannot be used or anything else
    stands in the way, one line on stderr says so, and the script runs unobserved.
    """
    from distdiag.record.guard import guarded

    def begin() -> None:
        from distdiag.agent.attach import attach_agent

        attach_agent(options)

    guarded(begin, "attach()")


def detach() -> None:
    """Observe this process no longer; it goes on as if distdiag had not been there."""
    from distdiag.agent.attach import detach_agent

    detach_agent()
