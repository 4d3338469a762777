"""Reads what the ranks of a program wrote about their results."""

from pathlib import Path

__all__ = ["read_records"]


def read_records(out: Path) -> dict[str, str]:
    """Return the text of each rank's record of the program that was started with `--out`."""
    return {
        path.suffixes[-2][1:]: path.read_text() for path in out.parent.glob(f"{out.name}.rank*")
    }
