"""The ``[[ignore]]`` tables of a configuration: findings that the user takes as meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

Pattern = Annotated[str, msgspec.Meta(min_length=1)]
Reason = Annotated[str, msgspec.Meta(pattern=r"\S")]


class IgnoreRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Findings that do not count, and why: those that fit all of `codes`, `path` and `subject`.

    `codes` are codes or their prefixes. `path` is a pattern of the file that a finding is in, whole
    or from any folder on; `subject` one of what a finding is about. ``*`` stands for anything.

    Example: ``IgnoreRule(codes=("REP001",), path="eval/*.py", reason="its own EMA")``.
    """

    codes: Annotated[tuple[Pattern, ...], msgspec.Meta(min_length=1)]
    reason: Reason
    path: Pattern = "*"
    subject: Pattern = "*"

    def fits(self, code: str, file: str, subjects: Iterable[str]) -> bool:
        """Tell whether a finding of this code, in this file ("": none), is meant."""
        return (
            code.startswith(self.codes)
            and (self.path == "*" or (file != "" and _is_in(file, self.path)))
            and (self.subject == "*" or any(fnmatchcase(s, self.subject) for s in subjects))
        )


def _is_in(file: str, pattern: str) -> bool:
    return fnmatchcase(file, pattern) or fnmatchcase(file, f"*/{pattern}")


def ignores_of(value: object) -> tuple[tuple[str, ...], tuple[IgnoreRule, ...]]:
    """Return what the key ``ignore`` says: checks to leave out, and rules from its tables.

    It is a list of codes, a table, a list of tables, or a list of both.

    Raises:
        ValueError: a value does not fit; the message says which.

    """
    entries: Sequence[object] = value if isinstance(value, list) else [value]
    try:
        rules = [msgspec.convert(e, IgnoreRule) for e in entries if not isinstance(e, str)]
    except msgspec.ValidationError as error:
        hint = "expected codes, or tables with codes, reason and perhaps path and subject"
        raise ValueError(f'key "ignore": {hint}: {error}') from None
    return tuple(entry for entry in entries if isinstance(entry, str)), tuple(rules)
