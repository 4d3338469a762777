"""The verdicts of the whole matrix as one table in Markdown, and whether they are good enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from scripts.parity_matrix.cells import CELLS, WITHOUT
from scripts.parity_matrix.comparing import Verdict
from scripts.parity_matrix.models import KITS
from scripts.parity_matrix.mutations import CLEAN, MUTATIONS

FOUND: Final = 0.95
BLAMED: Final = 0.90


def is_good(verdicts: Iterable[Verdict]) -> bool:
    """Say whether no right run was accused, and enough broken ones were found and blamed."""
    clean, broken = _split(verdicts)
    alarms = sum(each.is_found for each in clean)
    found = sum(each.is_found for each in broken)
    right = sum(each.is_right for each in broken)
    return not alarms and found >= FOUND * len(broken) and right >= BLAMED * len(broken)


def summary(verdicts: Iterable[Verdict]) -> str:
    """Say in one line how good they are."""
    clean, broken = _split(verdicts)
    alarms = sum(each.is_found for each in clean)
    found = sum(each.is_found for each in broken)
    right = sum(each.is_right for each in broken)
    return (
        f"{alarms} of {len(clean)} right runs accused; of {len(broken)} broken runs "
        f"{found} found{_share(found, len(broken))}, "
        f"{right} blamed rightly{_share(right, len(broken))}"
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a row for each mutation and a column for each cell: found / blamed rightly / runs."""
    cells = [name for name in CELLS if any(each.run.cell == name for each in verdicts)]
    lines = [
        "| run | " + " | ".join(cells) + " | all |",
        "| --- |" + " ---: |" * (len(cells) + 1),
    ]
    for mutation in MUTATIONS:
        rows = [each for each in verdicts if each.run.mutation == mutation]
        if rows:
            columns = [[each for each in rows if each.run.cell == cell] for cell in cells]
            counts = " | ".join(_counts(column, mutation) for column in [*columns, rows])
            lines.append(f"| {mutation} | {counts} |")
    return "\n".join([*lines, "", summary(verdicts) + ".", *_left_out(cells)]) + "\n"


def _counts(verdicts: Sequence[Verdict], mutation: str) -> str:
    if not verdicts:
        return ""
    found = sum(each.is_found for each in verdicts)
    if mutation == CLEAN:
        return f"{found} / {len(verdicts)}"
    return f"{found} / {sum(each.is_right for each in verdicts)} / {len(verdicts)}"


def _left_out(cells: Iterable[str]) -> list[str]:
    lines = [
        f"Not run: {cell} with {kit.name}, since {CELLS[cell].why_not(kit)}."
        for cell in cells
        for kit in KITS.values()
        if CELLS[cell].why_not(kit)
    ]
    lines += [f"Not run: {name}, since {why}." for name, why in WITHOUT.items()]
    return ["", *lines]


def _share(part: int, whole: int) -> str:
    return f" ({part / whole:.1%})" if whole else ""


def _split(verdicts: Iterable[Verdict]) -> tuple[list[Verdict], list[Verdict]]:
    clean: list[Verdict] = []
    broken: list[Verdict] = []
    for each in verdicts:
        (clean if each.run.mutation == CLEAN else broken).append(each)
    return clean, broken
