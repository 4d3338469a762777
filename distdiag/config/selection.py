"""Which checks run: a decision by the prefixes of their codes."""

from collections.abc import Collection
from difflib import get_close_matches

import msgspec

from distdiag.events.errors import UsageError

EVERYTHING = "ALL"


class Selection(msgspec.Struct, frozen=True):
    """Prefixes of codes to run and to leave out; the longest that fits decides, a tie leaves out.

    Example: ``Selection(select=("COL",), ignore=("COL01",))`` runs COL001 and not COL011. An empty
    `select` means ``ALL``.
    """

    select: tuple[str, ...] = (EVERYTHING,)
    ignore: tuple[str, ...] = ()

    def selects(self, code: str) -> bool:
        """Tell whether the check with this code runs."""
        return _longest(self.select or (EVERYTHING,), code) > _longest(self.ignore, code)

    def validate(self, codes: Collection[str]) -> None:
        """Make sure that each prefix fits a code of the catalogue.

        Raises:
            UsageError: a prefix fits none.

        """
        for prefix in self.select + self.ignore:
            if prefix != EVERYTHING and not _fits_any(prefix, codes):
                raise UsageError(f'unknown code or prefix "{prefix}"{_suggestion(prefix, codes)}')


def _longest(prefixes: tuple[str, ...], code: str) -> int:
    """Return the length of the longest prefix that fits, 0 for ``ALL``, -1 for none."""
    lengths = [
        0 if prefix == EVERYTHING else len(prefix) for prefix in prefixes if _fits(prefix, code)
    ]
    return max(lengths, default=-1)


def _fits(prefix: str, code: str) -> bool:
    return prefix == EVERYTHING or code.startswith(prefix)


def _fits_any(prefix: str, codes: Collection[str]) -> bool:
    return prefix != "" and any(code.startswith(prefix) for code in codes)


def _suggestion(prefix: str, codes: Collection[str]) -> str:
    families = {code[:3] for code in codes}
    close = get_close_matches(prefix.upper(), sorted({*codes, *families, EVERYTHING}), n=3)
    return f" (did you mean {', '.join(close)}?)" if close else ""
