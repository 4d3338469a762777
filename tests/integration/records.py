"""Reads what the ranks of a program wrote about their results."""

from pathlib import Path

import msgspec

from tests.integration.launch import Outcome

__all__ = ["Recorded", "read_records"]


class Recorded(msgspec.Struct, frozen=True):
    """A run and the records of its ranks: `{"rank0": "...", "rank1": "..."}`."""

    outcome: Outcome
    records: dict[str, str]


def read_records(out: Path) -> dict[str, str]:
    """Return the text of each rank's record of the program that was started with `--out`."""
    return {
        path.suffixes[-2][1:]: path.read_text() for path in out.parent.glob(f"{out.name}.rank*")
    }
