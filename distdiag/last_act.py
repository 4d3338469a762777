"""What a rank did last, in one sentence."""

from __future__ import annotations

from distdiag.alignment import Fate, RankState
from distdiag.event import Frame


def last_act(state: RankState) -> str:
    """Say in one sentence what a rank did last.

    Example: ``all_reduce #12 in default_pg at train.py:41 (issued), step 3, phase backward``.
    """
    if state.raised:
        place = _place(next((f for f in state.raised.frames if f.user), None))
        message = " ".join(state.raised.message.split())[:200]
        return f"raised {state.raised.type}{place} in step {state.step}: {message}"
    if state.fate is Fate.SILENT:
        return ""
    where = f"step {state.step}, phase {state.phase}"
    call = state.last_call
    if call is not None:
        number = f" #{call.collective_seq_id}" if call.collective_seq_id >= 0 else ""
        place = _place(call.site.location)
        doing = f"{call.signature.op}{number} in {call.group.label}{place}"
        where = f"{doing} ({state.last_call_state}), {where}"
    if state.fate is Fate.FINISHED:
        return f"finished with exit status {state.exit_status}; before that {where}"
    return where


def _place(frame: Frame | None) -> str:
    return f" at {frame.file}:{frame.line}" if frame else ""
