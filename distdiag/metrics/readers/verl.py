"""verl, and others that print all values on one line: ``step:1 - actor/kl:0.1 - ...``."""

from __future__ import annotations

import re
from typing import Final

from distdiag.metrics.readers.lines import LineFormat, Parsed, named
from distdiag.metrics.readers.numbers import fields

_STEP: Final = re.compile(r"\bstep: ?(\d{1,12}+) - (?=[\w/])")


def _read(line: str) -> Parsed | None:
    match = _STEP.search(line)
    if match is None:
        return None
    return Parsed(named(fields(line[match.end() :], " - ")), match.start(), step=float(match[1]))


VERL: Final = LineFormat("verl", (b"step:",), _read)
