"""What every event has: its rank and time, and where in the program it came from."""

from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """What a rank is busy with, as far as its heartbeat tells."""

    STARTING = "starting"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    DATALOADER = "dataloader"
    CHECKPOINT = "checkpoint"
    COMPILE = "compile"
    SCRIPT = "script"
    FINISHED = "finished"


class Frame(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """One frame of a Python stack. `user` is false inside torch, known frameworks and distdiag."""

    file: str
    line: int
    function: str
    user: bool = True


class CallSite(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """Where a call was made: the Python stack, innermost frame first.

    `module` is the FQN of the sharded module on whose behalf the call was made, where known.
    """

    frames: tuple[Frame, ...]
    module: str | None = None

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """The frames of the user's own code, innermost first."""
        return tuple(frame for frame in self.frames if frame.user)

    @property
    def location(self) -> Frame | None:
        """The innermost frame of the user's own code, or None if the stack shows none."""
        return next((frame for frame in self.frames if frame.user), None)


class Event(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, tag_field="kind"):
    """Something one rank saw at one moment.

    `seq` numbers the events of one rank from 0, `time_ns` is its monotonic clock, `step` counts
    the optimizer steps that it finished.
    """

    rank: int
    seq: int
    time_ns: int
    step: int = 0


Value = str | int | float | bool | None
