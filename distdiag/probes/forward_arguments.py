"""What the outermost module was given in whose forward pass a call happens."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any, Final

from torch import nn

from distdiag.probes.sequence_exchanges import TORCH

_MOST_FRAMES: Final = 200
_VARIADIC: Final = (0x04, 0x08)
"""Flags of code that takes further positional arguments, and further named ones."""


def arguments_of(frame: FrameType | None) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of the outermost user's module that runs, None if there is none.

    A frame keeps what was read of its variables until it ends, where its function asked for them
    itself even under its eyes: such a function is left alone, and others get rid of it at once.
    """
    outermost: FrameType | None = None
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if (
            code.co_name == "forward"
            and code.co_argcount
            and not code.co_filename.startswith(TORCH)
        ):
            outermost = frame
        frame = frame.f_back
    if outermost is None or {"locals", "vars", "eval", "exec"} & {*outermost.f_code.co_names}:
        return None
    variables = outermost.f_locals
    names = _names_of(outermost.f_code)
    given = {name: variables[name] for name in names if name in variables}
    if type(variables) is dict:  # before Python 3.13 it is a copy
        variables.clear()
    if not isinstance(given.pop(names[0], None), nn.Module):
        return None
    args, kwargs = (_variadic(outermost.f_code, given, flag) for flag in _VARIADIC)
    return tuple(args or ()), given | dict(kwargs or {})


def _names_of(code: CodeType) -> tuple[str, ...]:
    number = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[: number + sum(bool(code.co_flags & flag) for flag in _VARIADIC)]


def _variadic(code: CodeType, given: dict[str, Any], flag: int) -> Any:  # noqa: ANN401
    """Take what further arguments of a kind there are."""
    if not code.co_flags & flag:
        return None
    is_second = flag == _VARIADIC[1] and bool(code.co_flags & _VARIADIC[0])
    index = code.co_argcount + code.co_kwonlyargcount + is_second
    return given.pop(code.co_varnames[index], None)
