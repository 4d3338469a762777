"""Helpers that answer as rank 0 while there is no process group."""

from __future__ import annotations

import ast
import re
from typing import Final

from distdiag.lint.effects import Effects
from distdiag.lint.modules import Function, all_nodes
from distdiag.lint.sites import Site, sites_of

_MAX_DEPTH: Final = 3
_GET_RANK: Final = re.compile(r"^(torch\.distributed(\.\w+)?|dist)\.get_rank$")
_ASKING: Final = re.compile(r"rank|main|master|primary|zero|lead|chief", re.IGNORECASE)
_IS_READY: Final = re.compile(r"initialized|avail")
# Who asks the launcher's variables knows the rank before there is a process group.
_LAUNCHER: Final = re.compile(r"environ|getenv|RANK")


def guesses_rank(site: Site, effects: Effects, depth: int = 0) -> bool:
    """Say whether a call answers as rank 0 while there is no process group."""
    if _GET_RANK.match(site.function.module.full_name(site.call.func)):
        around = site.function.node if depth else site.statement
        asks_launcher = isinstance(around, ast.stmt) and _LAUNCHER.search(_text(around))
        return not asks_launcher and asks_whether_ready(site, effects)
    if depth == _MAX_DEPTH or not _ASKING.search(ast.unparse(site.call.func)):
        return False
    function = effects.project.target(site.call, site.function)
    if function is None or not _is_small(function):
        return False
    return any(guesses_rank(inner, effects, depth + 1) for inner in sites_of(function))


def asks_whether_ready(site: Site, effects: Effects) -> bool:
    """Say whether a test before a call asks if there is a process group, itself or by a helper."""
    conditions = (*site.conditions, *(c for way in site.exits for c in way.conditions))
    for test in (condition.test for condition in conditions):
        if _IS_READY.search(ast.unparse(test)):
            return True
        calls = (node for node in (test, *all_nodes(test)) if isinstance(node, ast.Call))
        for call in calls:
            helper = effects.project.target(call, site.function)
            if helper and _is_small(helper) and _IS_READY.search(ast.unparse(helper.node)):
                return True
    return False


def _is_small(function: Function) -> bool:
    """Say whether a function only tells something: a longer one does other things as well."""
    return not isinstance(function.node, ast.Module) and len(function.node.body) <= 5


def _text(statement: ast.stmt) -> str:
    if isinstance(statement, ast.If | ast.While):
        return ast.unparse(statement.test)
    return ast.unparse(statement)
