"""The sentences that the checks of a parity comparison share."""

import math
from collections.abc import Iterator
from typing import ClassVar, Final

from distdiag.checks.base import Check
from distdiag.events.comparisons import Difference, Divergence, Reason, Subject
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity

MOST_NAMED: Final = 4


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
            summary="the weight of the data of each coordinate in the gradient",
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


def listed(event: Divergence) -> str:
    """Return the names of the first few that differ."""
    names = subjects_of(event)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def because(event: Divergence) -> str:
    """Return the explanation as the end of a sentence, empty if there is none."""
    return (f": {event.explanation}" if event.explanation else "") + doubt(event)


def doubt(event: Divergence) -> str:
    """Say what the comparison itself has put into the batches, and how to name the values."""
    if not event.padded:
        return ""
    names = ", ".join(event.padded)
    values = " ".join(f"--pad {name.rpartition('/')[2]}=VALUE" for name in event.padded)
    return (
        "; this proves nothing, because the comparison joined batches of unequal lengths and "
        f"padded {names} with zeros: name the padding ({values}), or pad to one length in the "
        "collate function"
    )


def subjects_of(event: Divergence) -> tuple[str, ...]:
    """Return the names of what differs."""
    return tuple(
        difference.name.rpartition("/")[2].partition("#")[0].removesuffix("()")
        for difference in event.differences
    )


class DisparityCheck(Check[Divergence]):
    """What the checks of comparisons share: each judges what differs for one `reason`.

    Where the reason is not known, what differs in one `subject`.
    """

    subject: ClassVar[Subject | None] = None
    reason: ClassVar[Reason] = Reason.UNKNOWN
    may_be_meant: ClassVar[bool] = True
    """Whether a comparison whose batches were filled up says no more than a note."""

    def message(self, event: Divergence) -> str:
        """Say what differs."""
        raise NotImplementedError

    def check(self, event: Divergence) -> Iterator[Finding]:
        """Judge comparisons of the subject and reason."""
        if event.reason is not self.reason or self.subject not in (None, event.subject):
            return
        yield self.finding(
            self.message(event),
            ranks=event.culprits,
            step=event.step,
            location=user_location((event.site,)) if event.site is not None else None,
            subjects=subjects_of(event),
            evidence=tuple(evidence_of(event)),
            severity=self.severity_of(event),
            grade=self._grade(event),
            fix=event.fix or self.fix,
        )

    def severity_of(self, event: Divergence) -> Severity:
        """Return how bad it is: what may be intended is a warning."""
        return self.severity

    def _grade(self, event: Divergence) -> Grade:
        """Return how sure it is: what the comparison itself has put into batches proves nothing."""
        if not self.may_be_meant:
            return Grade.PROVEN
        if event.padded:
            return Grade.NOTE
        return Grade.LIKELY if event.is_filled else Grade.PROVEN
