"""The findings of a run as they come, are replaced and are taken back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from distdiag.engine.folding import folded
from distdiag.finding import Finding, Grade, Severity

Identity = tuple[object, ...]

_LATER: Final = "(the job went on later)"


class Conclusions:
    """What the checks have concluded so far."""

    def __init__(self, covers: Mapping[str, Collection[str]]) -> None:
        """Begin with nothing; by code, `covers` says which codes tell of the same cause."""
        self._covers = covers
        self._findings: dict[Identity, Finding] = {}
        self._revised: dict[object, list[Finding]] = {}

    def all(self) -> tuple[Finding, ...]:
        """Return each finding once: those that stand, in their order, then those that may grow.

        Of those with one cause one is returned.
        """
        found = dict(self._findings)
        for findings in self._revised.values():
            for finding in findings:
                _take(found, finding)
        return folded(found.values(), self._covers)

    def add(self, finding: Finding) -> None:
        """Take in a finding; one that is there already stays as it is, unless it was but a note."""
        _take(self._findings, finding)

    def revise(self, subject: object, findings: list[Finding]) -> None:
        """Replace what was concluded about something that has grown since."""
        self._revised[subject] = findings

    def identities(self) -> set[Identity]:
        """Return which findings stand."""
        return set(self._findings)

    def has_alarm(self) -> bool:
        """Whether a finding that stands is a warning or worse."""
        return any(f.severity is not Severity.INFO for f in self._findings.values())

    def soften(self, identities: Iterable[Identity]) -> None:
        """Take back what a stall said, since the job went on after all."""
        for identity in identities:
            finding = self._findings.get(identity)
            if finding is not None and finding.severity is not Severity.INFO:
                self._findings[identity] = msgspec.structs.replace(
                    finding, severity=Severity.INFO, message=f"{finding.message} {_LATER}"
                )


def _take(findings: dict[Identity, Finding], finding: Finding) -> None:
    known = findings.setdefault(finding.identity, finding)
    if known.grade is Grade.NOTE and finding.grade is not Grade.NOTE:
        findings[finding.identity] = finding
