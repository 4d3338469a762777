"""Which findings do not count: by a comment on their line, the configuration, or a baseline."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from distdiag.config.ignores import IgnoreRule
from distdiag.findings.finding import Evidence, Finding, IgnoredFinding
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

    def split(
        self, findings: Iterable[Finding]
    ) -> tuple[tuple[Finding, ...], tuple[IgnoredFinding, ...]]:
        """Return the findings that count, and those that do not, each with its fingerprint.

        One whose comment gives no reason counts, and has evidence that says so.
        """
        standing: list[Finding] = []
        ignored: list[IgnoredFinding] = []
        for finding in findings:
            marked = msgspec.structs.replace(finding, fingerprint=fingerprint_of(finding))
            decided = self._decide(marked)
            if isinstance(decided, IgnoredFinding):
                ignored.append(decided)
            else:
                standing.append(decided)
        return tuple(standing), tuple(ignored)

    def _decide(self, finding: Finding) -> Finding | IgnoredFinding:
        comment = _comment_on(finding)
        if comment is not None and comment.reason:
            return IgnoredFinding(finding=finding, by="comment", reason=comment.reason)
        file = finding.location.file if finding.location else ""
        for rule in self._rules:
            if rule.fits(finding.code, file, finding.subjects):
                return IgnoredFinding(finding=finding, by="configuration", reason=rule.reason)
        reason = self._baseline.get(finding.fingerprint)
        if reason is not None:
            return IgnoredFinding(finding=finding, by="baseline", reason=reason)
        return _with_note(finding) if comment is not None else finding


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
