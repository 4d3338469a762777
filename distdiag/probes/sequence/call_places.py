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
    """Where a call stands: the functions that are running, and the lines at which they are.

    `offsets` say for each of them how far it has come in its code.
    """

    codes: frozenset[CodeType]
    lines: tuple[Line, ...]
    scope: CodeType | None
    is_module: bool
    offsets: tuple[int, ...] = ()

    @classmethod
    def of(cls, frame: FrameType | None) -> Place:
        """Look at the functions up from this frame; `scope` is the innermost module's forward."""
        lines: list[Line] = []
        offsets: list[int] = []
        scope: CodeType | None = None
        own: CodeType | None = None
        while frame is not None and len(lines) < _MOST_FRAMES:
            code = frame.f_code
            if not code.co_filename.startswith(TORCH):
                lines.append((code, frame.f_lineno))
                offsets.append(frame.f_lasti)
                own = own or code
                if scope is None and code.co_name == "forward" and code.co_varnames[:1] == _SELF:
                    scope = code
            frame = frame.f_back
        codes = frozenset(code for code, _ in lines)
        return cls(codes, tuple(lines), scope or own, scope is not None, tuple(offsets))

    def offset_in(self, scope: CodeType | None) -> int:
        """Return how far the innermost call of a function has come; -1 if none is running."""
        known = zip(self.lines, self.offsets, strict=False)
        return next((offset for (code, _), offset in known if code is scope), -1)
