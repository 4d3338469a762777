"""Diagnostics for distributed PyTorch training: why a run is wrong or stuck."""

from __future__ import annotations

from typing import Any

__all__ = ["attach", "detach"]


def attach(**options: Any) -> None:  # noqa: ANN401
    """Begin to observe this process, for scripts that cannot be started with ``-m distdiag.check``.

    Call it on every rank, before `init_process_group`. The options are those of the command line
    with ``_`` for ``-``: ``attach(run_dir="runs/a", on_hang="abort")``. A second call changes
    nothing.

    Raises:
        UsageError: an option is wrong, or the run directory cannot be used.

    """
    from distdiag.attaching import attach_agent

    attach_agent(options)


def detach() -> None:
    """Observe this process no longer; it goes on as if distdiag had not been there."""
    from distdiag.attaching import detach_agent

    detach_agent()
