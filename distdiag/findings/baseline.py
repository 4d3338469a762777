"""A baseline: the findings of an earlier run that a team knows, by their fingerprints."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from distdiag.events.errors import UNDECODABLE, UsageError
from distdiag.findings.finding import Finding
from distdiag.findings.fingerprint import encodable, fingerprint_of
from distdiag.record.regular_file import read_regular
from distdiag.record.visible import json_text

VERSION: Final = 1
LARGEST: Final = 64 << 20
"""A file that is longer, in bytes, is no baseline: an entry takes some 300."""
LONGEST_MESSAGE: Final = 200


class KnownFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding that is known. Only `fingerprint` is compared; the rest is for those who read it.

    `place` is file and line as they were. A person may add why the finding is kept as `reason`.
    """

    fingerprint: str
    code: str
    name: str = ""
    place: str = ""
    message: str = ""
    reason: str = ""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The known findings, each once."""

    baseline_version: int
    tool_version: str = ""
    findings: tuple[KnownFinding, ...] = ()

    @property
    def reasons(self) -> dict[str, str]:
        """Why each finding is kept, by fingerprint; "" where nobody has said it."""
        return {known.fingerprint: known.reason for known in self.findings}


def baseline_of(findings: Iterable[Finding], *, tool_version: str) -> Baseline:
    """Return the baseline that knows these findings."""
    known = {fingerprint_of(finding): _known(finding) for finding in findings}
    rows = sorted(known.values(), key=lambda row: (row.code, row.fingerprint))
    return Baseline(baseline_version=VERSION, tool_version=tool_version, findings=tuple(rows))


def with_reasons(baseline: Baseline, reasons: Mapping[str, str]) -> Baseline:
    """Return the baseline with the reasons that were given before, by fingerprint."""
    rows = tuple(
        msgspec.structs.replace(known, reason=reasons.get(known.fingerprint, known.reason))
        for known in baseline.findings
    )
    return msgspec.structs.replace(baseline, findings=rows)


def _known(finding: Finding) -> KnownFinding:
    location = finding.location
    # The name of the file only: the baseline is kept beside the code, for every machine.
    place = f"{Path(location.file).name}:{location.line}" if location else ""
    return KnownFinding(
        fingerprint=fingerprint_of(finding),
        code=encodable(finding.code),
        name=encodable(finding.name),
        place=encodable(place),
        message=encodable(finding.message)[:LONGEST_MESSAGE],
    )


def encode_baseline(baseline: Baseline) -> bytes:
    """Return a baseline as indented JSON, which changes by lines."""
    return json_text(baseline).encode()


def read_baseline(path: Path) -> Baseline:
    """Read what `encode_baseline` wrote.

    Raises:
        UsageError: the file is not there, or no baseline.

    """
    try:
        baseline = msgspec.json.decode(read_regular(path, LARGEST), type=Baseline)
    except OSError as error:
        raise UsageError(f"baseline {path}: cannot be read: {error.strerror}") from None
    except UNDECODABLE as error:
        first = str(error).partition("\n")[0]
        raise UsageError(
            f"{path}: not a baseline ({first}): `distdiag baseline RUN -o FILE` writes one"
        ) from None
    if baseline.baseline_version != VERSION:
        raise UsageError(
            f"{path}: is of version {baseline.baseline_version}, and this distdiag reads {VERSION}"
        )
    return baseline
