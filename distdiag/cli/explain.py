"""``distdiag explain``: what a check detects, why that matters and how to fix it."""

import inspect
from difflib import get_close_matches
from typing import Any

import click

from distdiag.checks import Check, load_checks
from distdiag.events.errors import UsageError
from distdiag.lint.base import Rule
from distdiag.lint.rules import load_rules


def catalogue() -> dict[str, type[Check[Any]] | type[Rule]]:
    """Return all checks and the rules of `distdiag lint` by code; a check goes before a rule."""
    found: dict[str, type[Check[Any]] | type[Rule]] = {**load_rules()}
    found.update(load_checks())
    return {code: found[code] for code in sorted(found)}


def documentation(check: type[Check[Any]] | type[Rule]) -> str:
    """Return the explanation of a check."""
    return inspect.cleandoc(check.__doc__ or "This check has no documentation.")


@click.command("explain")
@click.argument("code")
def command(code: str) -> None:
    """Explain a check: what, why, and how to fix it.

    CODE is that of the check, such as COL003, or its name.
    """
    checks = catalogue()
    by_word = {word: check for check in checks.values() for word in (check.code, check.name)}
    wanted = by_word.get(code) or by_word.get(code.upper())
    if wanted is None:
        close = get_close_matches(code.upper(), checks, n=3) or get_close_matches(
            code, by_word, n=3
        )
        hint = f" (did you mean {', '.join(close)}?)" if close else " (distdiag list shows all)"
        raise UsageError(f'unknown code "{code}"{hint}')
    click.echo(f"{wanted.code} {wanted.name} ({wanted.severity})\n\n{documentation(wanted)}")
