"""How guarded calls are told."""

from __future__ import annotations

import ast

from distdiag.finding import Severity
from distdiag.lint.base import related
from distdiag.lint.finding import Related
from distdiag.lint.guarded import GuardedSite

_MAX_TEXT = 80
_LEAVING = {ast.Return: "return", ast.Raise: "raise", ast.Break: "break", ast.Continue: "continue"}


def severity_of(found: GuardedSite) -> Severity:
    """Return error for what is seen directly, warning through calls, info where it may not be."""
    if not found.is_certain:
        return Severity.INFO
    return Severity.ERROR if found.is_direct else Severity.WARNING


def call_text(found: GuardedSite) -> str:
    """Return the call, and the operation that it leads to."""
    called = short(found.site.call.func)
    if found.is_direct:
        return called
    last = found.effect.chain[-1]
    where = f"{last.function.module.path.name}:{last.call.lineno}"
    return f"{called}, which calls {short(last.call.func)} ({where}),"


def guard_text(found: GuardedSite) -> str:
    """Return the condition that keeps ranks from a call."""
    if found.test is None:
        return "a decorator of the function lets some ranks only into it"
    line = found.test.lineno
    if found.way_out is None:
        return f"it stands under `{short(found.test)}` (line {line})"
    way = _LEAVING.get(type(found.way_out.statement), "an exit")
    return f"it comes after a {way} under `{short(found.test)}` (line {line})".replace("a an", "an")


def places(found: GuardedSite) -> tuple[Related, ...]:
    """Return the condition and the calls on the way to the operation."""
    module = found.site.function.module
    guard = (related(module, found.test, "the condition"),) if found.test is not None else ()
    calls = (
        related(site.function.module, site.call, f"calls {short(site.call.func)}")
        for site in found.effect.chain[1:]
    )
    return (*guard, *calls)


def short(node: ast.AST) -> str:
    """Return the text of an expression on one line, at most 80 characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
