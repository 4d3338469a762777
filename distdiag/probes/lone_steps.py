"""Whether a rank that was launched with others has a process group when it first trains."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Final

from distdiag.event import CallSite, SteppedAlone
from distdiag.probes.stack import frames_of
from distdiag.recorder import Recorder

_OTHERS: Final = ("byteps", "hivemind", "horovod", "mpi4py", "ray", "torch_xla", "torchft")
"""Packages by which ranks exchange gradients without a process group of torch."""


def note_first_step(recorder: Recorder, frame: FrameType) -> None:
    """Write down that an optimizer steps for the first time while nothing connects the ranks."""
    num_launched, library = _num_launched(), _lone_library()
    if num_launched < 2 or (_is_connected() and not library):
        return
    recorder.event(
        SteppedAlone,
        num_launched=num_launched,
        library=library,
        others=tuple(name for name in _OTHERS if name in sys.modules),
        site=CallSite(frames_of(frame, recorder.main_script)),
    )


def _num_launched() -> int:
    """Return what the environment says now: a script may have said that it is alone."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


def _lone_library() -> str:
    """Return the library that trains as one process, whatever the environment says."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", {})
    # Without a GPU and not told to use CPUs, it makes a process group that it never uses.
    return "accelerate" if shared.get("num_processes") == 1 else ""


def _is_connected() -> bool:
    # Who has not imported it has no process group.
    dist = sys.modules.get("torch.distributed")
    rpc = sys.modules.get("torch.distributed.rpc")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    has_rpc = rpc is not None and rpc.is_available() and rpc.api._is_current_rpc_agent_set()
    return has_group or bool(has_rpc)
