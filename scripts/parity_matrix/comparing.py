"""Compares the recorded runs of one part, and judges what is said of each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from distdiag.events.comparisons import Divergence, Subject
from distdiag.parity.comparison import Comparison
from distdiag.parity.recorded_run import RecordedRun
from scripts.parity_matrix.cells import CELLS
from scripts.parity_matrix.models import KITS, Kit
from scripts.parity_matrix.mutations import CLEAN
from scripts.parity_matrix.plan import REFERENCES, Part, Run, read_part

CLOSE: Final = 2e-3


class Verdict(msgspec.Struct, frozen=True):
    """What was said of one run, and whether that is right."""

    model: str
    precision: str
    run: Run
    is_found: bool = False
    is_right: bool = False
    said: str = ""
    worst: float = 0.0

    @property
    def is_as_due(self) -> bool:
        """Whether a right run was left in peace, or a broken one was blamed rightly."""
        return not self.is_found if self.run.mutation == CLEAN else self.is_right


def verdicts(part: Part) -> list[Verdict]:
    """Compare every run of a part with the references of its cell and seed."""
    root = Path(part.folder)
    found, references = [], {}
    for run in part.runs():
        place = (run.cell, run.seed)
        if place not in references:
            references[place] = [
                RecordedRun(Run(*place, name).folder(root), "1 rank") for name in REFERENCES
            ]
        reference, *repeats = references[place]
        candidate = RecordedRun(run.folder(root), run.cell)
        result = Comparison(reference, repeats, candidate, is_replayed=True).run()
        divergence = result.divergence
        ratios = (ratio for row in result.rows for ratio in row.ratios.values())
        worst = min(max(ratios, default=0.0), sys.float_info.max)  # JSON has no infinity
        found.append(
            Verdict(
                model=part.model,
                precision=part.precision,
                run=run,
                is_found=divergence is not None,
                is_right=divergence is not None and _is_right(divergence, run, KITS[part.model]),
                said=_said(divergence),
                worst=worst,
            )
        )
    return found


def _said(divergence: Divergence | None) -> str:
    if divergence is None:
        return ""
    parts = [f"step {divergence.step}", divergence.subject.value]
    for each in divergence.differences[:3]:
        parts.append(
            f"{each.name} {each.measured:.3g}/{each.bound:.3g}={each.ratio:.3g} x{each.factor:.5g}"
        )
    parts.append(f"of {divergence.num_compared}")
    if divergence.culprits:
        parts.append(f"ranks {divergence.culprits}")
    return "; ".join([*parts, divergence.explanation, *divergence.details])


def _first(divergence: Divergence) -> str:
    """Return what differs first, without the model's name and the number of the call."""
    if not divergence.differences:
        return ""
    return divergence.differences[0].name.partition("/")[2].partition("#")[0]


def _is_at(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


Rule = Callable[[Divergence, Kit, Run], bool]


def _gradient_of_layer(found: Divergence, kit: Kit, _: Run) -> bool:
    return found.subject is Subject.GRADIENT and _is_at(_first(found), kit.layer)


def _factor_is_size(found: Divergence, _: Kit, run: Run) -> bool:
    size = f"({CELLS[run.cell].num_data})"
    is_named = "times the" in found.explanation and size in found.explanation
    return found.subject is Subject.GRADIENT and is_named


def _loss_or_gradient(found: Divergence, _: Kit, __: Run) -> bool:
    return found.subject in (Subject.LOSS, Subject.GRADIENT)


def _layer_itself(found: Divergence, kit: Kit, _: Run) -> bool:
    is_due = found.subject in (Subject.OUTPUT, Subject.UPDATE)
    return is_due and _is_at(_first(found), kit.layer)


def _layer_on_last_rank(found: Divergence, kit: Kit, run: Run) -> bool:
    return _layer_itself(found, kit, run) and _names_last_rank(found, run)


def _masked(found: Divergence, kit: Kit, run: Run) -> bool:
    is_due = found.subject is Subject.OUTPUT and _is_at(_first(found), kit.masked)
    return is_due and _names_last_rank(found, run)


def _names_last_rank(found: Divergence, run: Run) -> bool:
    cell = CELLS[run.cell]
    last = [r for r in range(cell.num_ranks) if cell.data_rank(r) == cell.num_data - 1]
    return list(found.culprits) == last


def _dropped(found: Divergence, kit: Kit, _: Run) -> bool:
    return found.subject is Subject.OUTPUT and _first(found) in kit.dropped


def _gradient(found: Divergence, _: Kit, __: Run) -> bool:
    return found.subject is Subject.GRADIENT


def _rate(found: Divergence, _: Kit, __: Run) -> bool:
    factor = found.differences[0].factor if found.differences else 1.0
    return found.subject is Subject.UPDATE and abs(factor - 1.01) < CLOSE


RULES: Final[Mapping[str, Rule]] = {
    "drop": _gradient_of_layer,
    "sum": _factor_is_size,
    "scale": _gradient_of_layer,
    "skip": _loss_or_gradient,
    "swap": _layer_itself,
    "shift": _loss_or_gradient,
    "mask": _masked,
    "stale": _layer_on_last_rank,
    "double": _loss_or_gradient,
    "group": _gradient,
    "dropout": _dropped,
    "lr": _rate,
}


def _is_right(found: Divergence, run: Run, kit: Kit) -> bool:
    return run.mutation != CLEAN and RULES[run.mutation](found, kit, run)


def main() -> None:
    """Compare the part named on the command line; the verdicts go into a file beside it."""
    part = read_part(sys.argv[1])
    path = Path(part.folder) / "verdicts.json"
    path.write_bytes(msgspec.json.encode(verdicts(part)))


if __name__ == "__main__":
    main()
