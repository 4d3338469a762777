"""Apply a unified diff of one file, strictly: every line must be where the diff says."""

import re
from collections.abc import Iterator

__all__ = ["PatchError", "apply_patch"]

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*\n")


class PatchError(ValueError):
    """A diff that is none, or that does not belong to the text."""


def apply_patch(text: str, patch: str) -> str:
    """Return the text after the diff, which `diff -u` has made with two lines of header."""
    old = text.splitlines(keepends=True)
    lines = patch.splitlines(keepends=True)
    if [line[:4] for line in lines[:2]] != ["--- ", "+++ "]:
        raise PatchError("a diff begins with the lines --- and +++")
    if not lines[2:]:
        raise PatchError("the diff changes nothing")
    new: list[str] = []
    place = 0
    for start, old_hunk, new_hunk in _hunks(lines[2:]):
        if start < place or old[start : start + len(old_hunk)] != old_hunk:
            raise PatchError(f"line {start + 1}: the text is not what the diff expects there")
        new += [*old[place:start], *new_hunk]
        place = start + len(old_hunk)
    return "".join([*new, *old[place:]])


def _hunks(lines: list[str]) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield of each hunk the index of its first line, the lines before and the lines after."""
    while lines:
        header = _HUNK.fullmatch(lines.pop(0))
        if header is None:
            raise PatchError("a hunk begins with a line @@")
        old: list[str] = []
        new: list[str] = []
        while lines and lines[0][0] in " +-":
            line = lines.pop(0)
            if line[0] != "+":
                old.append(line[1:])
            if line[0] != "-":
                new.append(line[1:])
        counts = (int(header[2] or 1), int(header[4] or 1))
        if counts != (len(old), len(new)):
            raise PatchError(f"a hunk of {counts} lines has {(len(old), len(new))}")
        # A hunk without a line of the old text names the line before it.
        yield int(header[1]) - bool(old), old, new
