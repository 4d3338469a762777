"""nanoGPT and what was made after it."""

from __future__ import annotations

import re
from typing import Final

from distdiag.metrics.readers.lines import LineFormat, Parsed, named
from distdiag.metrics.readers.numbers import NUMBER, UNIT, scaled

# ``iter 10: loss 3.2101, time 410.20ms, mfu 2.10%``; ``step 250: train loss 2.1, val loss 2.3``
_HEAD: Final = re.compile(
    r"\b(?:iter|step) (\d{1,12}+)(?: step \d{1,12}+)?: (?=(?:train |val )?loss )"
)
_PAIR: Final = re.compile(rf"([A-Za-z][A-Za-z_ ]{{0,40}}+)({NUMBER})({UNIT})?+")


def _read(line: str) -> Parsed | None:
    match = _HEAD.search(line)
    if match is None:
        return None
    found = _PAIR.finditer(line, match.end())
    values = named((pair[1].strip(), scaled(pair[2], pair[3])) for pair in found)
    return Parsed(values, match.start(), step=float(match[1]))


NANOGPT: Final = LineFormat("nanogpt", (b": loss ", b": train loss "), _read)
