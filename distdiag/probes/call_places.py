"""Where in the program a call stands, and which module makes it."""

from __future__ import annotations

import os
from types import CodeType, FrameType
from typing import Final, NamedTuple

import torch

TORCH: Final = os.path.dirname(torch.__file__) + os.sep
"""Where torch's own files are."""
_MOST_FRAMES: Final = 60
_SELF: Final = ("self",)

Line = tuple[CodeType, int]


class Place(NamedTuple):
    """Where a call stands: the functions that are running, and the lines at which they are."""

    codes: frozenset[CodeType]
    lines: tuple[Line, ...]
    scope: CodeType | None
    is_module: bool

    @classmethod
    def of(cls, frame: FrameType | None) -> Place:
        """Look at the functions up from this frame; `scope` is the innermost module's forward."""
        lines: list[Line] = []
        scope: CodeType | None = None
        own: CodeType | None = None
        while frame is not None and len(lines) < _MOST_FRAMES:
            code = frame.f_code
            if not code.co_filename.startswith(TORCH):
                lines.append((code, frame.f_lineno))
                own = own or code
                if scope is None and code.co_name == "forward" and code.co_varnames[:1] == _SELF:
                    scope = code
            frame = frame.f_back
        codes = frozenset(code for code, _ in lines)
        return cls(codes, tuple(lines), scope or own, scope is not None)
