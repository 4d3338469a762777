"""Which findings do not count: by a comment on their line, the configuration, or a baseline."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from distdiag.config.ignores import IgnoreRule
from distdiag.findings.finding import Evidence, Finding, IgnoredFinding, Way
from distdiag.findings.fingerprint import fingerprint_of
from distdiag.findings.source import statement_lines

# Comments: ``# distdiag: ignore[REP001] each rank has its own EMA``.

_COMMENT: Final = re.compile(
    r"#\s*distdiag:\s*ignore(?P<list>\[(?P<codes>[^\]]*)\])?(?P<reason>[^#]*)", re.IGNORECASE
)
LONGEST_LINE: Final = 10_000
"""A longer line, in characters, is data, and is not searched."""


@dataclass(frozen=True, slots=True)
class IgnoreComment:
    """What a comment on a line says: the codes or names in its brackets, and the reason behind."""

    wanted: frozenset[str]
    has_codes: bool
    reason: str

    def names(self, code: str, name: str) -> bool:
        """Tell whether a check, by its code or its name, stands in the brackets."""
        return bool(self.wanted & {code.lower(), name.lower()})


def ignore_comment(line: str) -> IgnoreComment | None:
    """Return the comment on a line that silences findings, if there is one."""
    found = _COMMENT.search(line[:LONGEST_LINE])
    if found is None:
        return None
    codes = (found["codes"] or "").split(",")
    wanted = frozenset(code.strip().lower() for code in codes) - {""}
    return IgnoreComment(wanted, found["list"] is not None, found["reason"].strip(" \t-:,."))


# The decision.


@dataclass(frozen=True, slots=True)
class _Decision:
    """What is decided of a finding: by what it is ignored, None if it counts.

    `lacks_reason`: a comment names it and gives no reason.
    """

    fingerprint: str
    by: Way | None = None
    reason: str = ""
    lacks_reason: bool = False


class Ignores:
    """What a run was told to ignore: rules of the configuration, and a baseline with its reasons.

    `baseline` maps fingerprints to reasons. Comments are read where the findings are.
    """

    def __init__(
        self,
        rules: Sequence[IgnoreRule] = (),
        baseline: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._rules = rules
        self._baseline = baseline
        # A monitor asks many times a second, and source files are parsed for the answer.
        self._decided: dict[tuple[object, ...], _Decision] = {}

    def split(
        self, findings: Iterable[Finding]
    ) -> tuple[tuple[Finding, ...], tuple[IgnoredFinding, ...]]:
        """Return the findings that count, and those that do not, each with its fingerprint.

        One whose comment gives no reason counts, and has evidence that says so.
        """
        standing: list[Finding] = []
        ignored: list[IgnoredFinding] = []
        for finding in findings:
            decision = self._decision(finding)
            marked = msgspec.structs.replace(finding, fingerprint=decision.fingerprint)
            if decision.by is not None:
                ignored.append(
                    IgnoredFinding(finding=marked, by=decision.by, reason=decision.reason)
                )
            else:
                standing.append(_with_note(marked) if decision.lacks_reason else marked)
        return tuple(standing), tuple(ignored)

    def _decision(self, finding: Finding) -> _Decision:
        key = (finding.code, finding.name, finding.subjects, finding.location)
        if key not in self._decided:
            self._decided[key] = self._decide(finding)
        return self._decided[key]

    def _decide(self, finding: Finding) -> _Decision:
        fingerprint = fingerprint_of(finding)
        comment = _comment_on(finding)
        if comment is not None and comment.reason:
            return _Decision(fingerprint, "comment", comment.reason)
        file = finding.location.file if finding.location else ""
        for rule in self._rules:
            if rule.fits(finding.code, file, finding.subjects):
                return _Decision(fingerprint, "configuration", rule.reason)
        if fingerprint in self._baseline:
            return _Decision(fingerprint, "baseline", self._baseline[fingerprint])
        return _Decision(fingerprint, lacks_reason=comment is not None)


def _comment_on(finding: Finding) -> IgnoreComment | None:
    """Return the comment at a finding's statement that names its check."""
    if finding.location is None:
        return None
    comments = map(ignore_comment, statement_lines(finding.location))
    meant = [c for c in comments if c is not None and c.names(finding.code, finding.name)]
    return max(meant, key=lambda comment: bool(comment.reason), default=None)


def _with_note(finding: Finding) -> Finding:
    text = (
        f"the comment `# distdiag: ignore[{finding.code}]` here gives no reason, so the finding "
        f"counts; write why it is meant behind the bracket"
    )
    note = Evidence(ranks=finding.ranks, summary=text, location=finding.location)
    if note in finding.evidence:
        return finding
    return msgspec.structs.replace(finding, evidence=(*finding.evidence, note))
