"""The sentences that the checks of a parity comparison share."""

from __future__ import annotations

import math
from collections.abc import Iterator

from distdiag.events.comparisons import Difference, Divergence
from distdiag.findings.finding import Evidence


def figures(difference: Difference) -> str:
    """Say how large a difference is, and what rounding explains of it."""
    if math.isnan(difference.measured):
        return f"{difference.name} differs between the ranks that hold it"
    if math.isinf(difference.ratio):
        return f"{difference.name} differs by {difference.measured:.3g}, rounding explains nothing"
    return (
        f"{difference.name} differs by {difference.measured:.3g} of itself, rounding explains "
        f"{difference.bound:.3g} ({difference.ratio:.3g} times as much)"
    )


def evidence_of(divergence: Divergence) -> tuple[Evidence, ...]:
    """Return the evidence of a divergence: the figures, then the details."""
    return tuple(_evidence(divergence))


def _evidence(divergence: Divergence) -> Iterator[Evidence]:
    for difference in divergence.differences:
        yield Evidence(
            ranks=divergence.culprits,
            summary=figures(difference),
            values={
                "measured": difference.measured,
                "bound": difference.bound,
                "ratio": difference.ratio,
                "factor": difference.factor,
            },
        )
    if divergence.weights:
        weights = {f"weight of coordinate {n}": w for n, w in enumerate(divergence.weights)}
        due = {f"due weight of coordinate {n}": w for n, w in enumerate(divergence.due)}
        yield Evidence(
            ranks=divergence.culprits,
            summary="the weights with which the data of each coordinate enters the gradient",
            values={**weights, **due},
        )
    for detail in divergence.details:
        yield Evidence(ranks=divergence.culprits, summary=detail)
    if not divergence.differences:
        yield Evidence(ranks=divergence.culprits, summary=divergence.explanation)


def how_many(divergence: Divergence) -> str:
    """Say how many of the compared quantities differ, as far as they are listed."""
    number = len(divergence.differences)
    return f"{number} or more" if number >= 8 else str(number)


def reason(divergence: Divergence) -> str:
    """Return the explanation as the end of a sentence, empty if there is none."""
    return (f": {divergence.explanation}" if divergence.explanation else "") + _doubt(divergence)


def _doubt(divergence: Divergence) -> str:
    """Say what the comparison itself has put into the batches, and how not to have it do so."""
    if not divergence.padded:
        return ""
    names = ", ".join(divergence.padded)
    values = " ".join(f"--pad {name.rpartition('/')[2]}=VALUE" for name in divergence.padded)
    return (
        f"; this proves nothing, since batches of unequal lengths were joined and {names} filled "
        f"up with zeros: name the values ({values}), or pad to one length in the collate function"
    )


def subjects_of(divergence: Divergence) -> tuple[str, ...]:
    """Return the names of what differs."""
    return tuple(
        difference.name.partition("/")[2].partition("#")[0] or difference.name
        for difference in divergence.differences
    )
