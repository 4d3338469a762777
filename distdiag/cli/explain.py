"""``distdiag explain``: what a check detects, why that matters and how to fix it."""

import inspect
from difflib import get_close_matches
from typing import Any

import click

from distdiag.checks import Check, load_checks
from distdiag.events.errors import UsageError
from distdiag.findings.known_faults import KnownFault, known_faults
from distdiag.lint.base import Rule
from distdiag.lint.rules import load_rules


def catalogue() -> dict[str, type[Check[Any]] | type[Rule]]:
    """Return all checks and the rules of `distdiag lint` by code; a check goes before a rule."""
    found: dict[str, type[Check[Any]] | type[Rule]] = {**load_rules()}
    found.update(load_checks())
    return {code: found[code] for code in sorted(found)}


def first_line(check: type[Check[Any]] | type[Rule]) -> str:
    """Return what a check detects, in one line."""
    return documentation(check).partition("\n")[0]


def documentation(check: type[Check[Any]] | type[Rule]) -> str:
    """Return the explanation of a check."""
    return inspect.cleandoc(check.__doc__ or "This check has no documentation.")


@click.command("explain")
@click.argument("code")
def command(code: str) -> None:
    """Explain a check or a known fault: what, why, and how to fix it.

    CODE is that of the check, such as COL003, or its name, or the name of a known fault. The first
    letters of codes, such as COL, list the checks of the family.
    """
    faults = {row.id: row for row in known_faults()}
    if code in faults:
        click.echo(_fault_page(faults[code]))
        return
    checks = catalogue()
    by_word = {word: check for check in checks.values() for word in (check.code, check.name)}
    wanted = by_word.get(code) or by_word.get(code.upper())
    family = [check for each, check in checks.items() if each.startswith(code.upper())]
    if wanted is None and family:
        for check in family:
            click.echo(f"{check.code}  {check.name}: {first_line(check)}")
        return
    if wanted is None:
        names = [*by_word, *faults]
        close = get_close_matches(code.upper(), checks, n=3) or get_close_matches(code, names, n=3)
        hint = f" (did you mean {', '.join(close)}?)" if close else " (distdiag list shows all)"
        raise UsageError(f'unknown code "{code}"{hint}')
    click.echo(f"{wanted.code} {wanted.name} ({wanted.severity})\n\n{documentation(wanted)}")


def _fault_page(row: KnownFault) -> str:
    signs = [f'"{word}"' for word in row.words] + [f"{frame} on a stack" for frame in row.frames]
    versions = f"\n\n## Versions\n{row.library} {row.versions}" if row.versions else ""
    return (
        f"{row.id} (known fault, of the {row.whose})\n\n{row.cause}\n\n"
        f"## What you see\n{' or '.join(signs)}{versions}\n\n"
        f"## How to fix\n{row.fix}\n\n## References\n- {row.link}"
    )
