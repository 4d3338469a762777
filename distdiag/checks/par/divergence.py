"""The sentences that the checks of a parity comparison share."""

import math
from collections.abc import Iterator
from typing import ClassVar

from distdiag.checks.base import Check
from distdiag.events.comparisons import Difference, Divergence, Subject
from distdiag.findings.finding import Evidence, Finding, Grade


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


def evidence_of(event: Divergence) -> Iterator[Evidence]:
    """Yield the evidence of a comparison: the figures, then the details."""
    for difference in event.differences:
        yield Evidence(
            ranks=event.culprits,
            summary=figures(difference),
            values={
                "measured": difference.measured,
                "bound": difference.bound,
                "ratio": difference.ratio,
                "factor": difference.factor,
            },
        )
    if event.weights:
        weights = {f"weight of coordinate {n}": w for n, w in enumerate(event.weights)}
        due = {f"due weight of coordinate {n}": w for n, w in enumerate(event.due)}
        yield Evidence(
            ranks=event.culprits,
            summary="the weights with which the data of each coordinate enters the gradient",
            values={**weights, **due},
        )
    for detail in event.details:
        yield Evidence(ranks=event.culprits, summary=detail)
    if not event.differences:
        yield Evidence(ranks=event.culprits, summary=event.explanation)


def how_many(event: Divergence) -> str:
    """Say how many of the compared quantities differ, as far as they are listed."""
    number = len(event.differences)
    return f"{number} or more" if number >= 8 else str(number)


def reason(event: Divergence) -> str:
    """Return the explanation as the end of a sentence, empty if there is none."""
    return (f": {event.explanation}" if event.explanation else "") + _doubt(event)


def _doubt(event: Divergence) -> str:
    """Say what the comparison itself has put into the batches, and how to name the values."""
    if not event.padded:
        return ""
    names = ", ".join(event.padded)
    values = " ".join(f"--pad {name.rpartition('/')[2]}=VALUE" for name in event.padded)
    return (
        f"; this proves nothing, since batches of unequal lengths were joined and {names} filled "
        f"up with zeros: name the values ({values}), or pad to one length in the collate function"
    )


def subjects_of(event: Divergence) -> tuple[str, ...]:
    """Return the names of what differs."""
    return tuple(
        difference.name.partition("/")[2].partition("#")[0] or difference.name
        for difference in event.differences
    )


class DisparityCheck(Check[Divergence]):
    """What the checks of comparisons share: each judges what differs in one `subject`."""

    subject: ClassVar[Subject]
    may_be_meant: ClassVar[bool] = True
    """Whether a comparison whose batches were filled up says no more than a note."""

    def message(self, event: Divergence) -> str:
        """Say what differs."""
        raise NotImplementedError

    def check(self, event: Divergence) -> Iterator[Finding]:
        """Judge comparisons of the subject."""
        if event.subject is self.subject:
            yield self.finding(
                self.message(event),
                ranks=event.culprits,
                step=event.step,
                subjects=subjects_of(event),
                evidence=tuple(evidence_of(event)),
                grade=Grade.NOTE if self.may_be_meant and event.is_doubtful else Grade.PROVEN,
            )
