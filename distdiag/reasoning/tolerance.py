"""Whether the code around an access copes with a file that is not there, or not any more."""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import Final

from distdiag.event import CallSite, Frame
from distdiag.reasoning.source import nodes_around

_ABSENCE: Final = {"FileNotFoundError", "OSError", "IOError", "EnvironmentError"}
_ANYTHING: Final = {"Exception", "BaseException"}
_FORGIVING: Final = {"ignore_errors", "missing_ok"}
_NEAR: Final = 2
"""Down to this user frame, a handler of all exceptions is meant for the access."""


def tolerates_absence(site: CallSite) -> bool:
    """Say whether the access made here goes on when the file is missing."""
    near = _near(site)
    return any(_is_forgiving(f) or _handles(f, _ABSENCE | _ANYTHING) for f in near) or any(
        _handles(frame, _ABSENCE) for frame in site.user_frames[_NEAR:]
    )


def tolerates_damage(site: CallSite) -> bool:
    """Say whether the access made here goes on whatever is wrong with the file."""
    return any(_handles(frame, _ANYTHING) for frame in _near(site))


def _near(site: CallSite) -> tuple[Frame, ...]:
    """Return the innermost frames, those of libraries too, to the second one of the user.

    What calls the outermost one of the user, such as pytest, catches all there is to report it.
    """
    own = [number for number, frame in enumerate(site.frames) if frame.user][:_NEAR]
    return site.frames[: own[-1] + 1] if own else site.frames


def _is_forgiving(frame: Frame) -> bool:
    return any(
        keyword.arg in _FORGIVING
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for node in nodes_around(frame)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )


def _handles(frame: Frame, names: set[str]) -> bool:
    around = nodes_around(frame)
    return any(
        _suppresses(node, names) or _catches(node, child, names) for node, child in pairwise(around)
    )


def _suppresses(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.With):
        return False
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(
        _name(call.func) == "suppress" and any(_name(kind) in names for kind in call.args)
        for call in calls
    )


def _catches(node: ast.AST, child: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Try) or child not in node.body:
        return False
    return any(
        _is_of(handler.type, names) and not _raises(handler.body) for handler in node.handlers
    )


def _is_of(kind: ast.expr | None, names: set[str]) -> bool:
    if kind is None:
        return "Exception" in names
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(_name(each) in names for each in kinds)


def _raises(body: list[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Raise) for statement in body for node in ast.walk(statement))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
