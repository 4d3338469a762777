"""The JSON form of reports, which other programs read."""

from typing import Any

import msgspec

from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.findings.finding import Report, Severity
from distdiag.record.visible import json_text
from distdiag.record.wire import decode_rank_set, plain


def _finite(value: object) -> object:
    """Spell numbers that JSON has no form for: msgspec would write null."""
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {_finite(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def encode_report(report: Report) -> bytes:
    """Return a report as indented JSON; NaN and infinities are the strings of their names."""
    tree = msgspec.to_builtins(report, enc_hook=plain)
    return json_text(_finite(tree)).rstrip("\n").encode()


def decode_report(text: bytes) -> Report:
    """Read a report.

    Raises:
        DamagedFileError: the text is not a report of this schema version.

    """
    try:
        report = msgspec.json.decode(text, type=Report, dec_hook=decode_rank_set)
    except UNDECODABLE as error:
        raise DamagedFileError(f"not a distdiag report: {error}") from None
    if report.fail_on not in (*Severity, "never"):
        raise DamagedFileError(f"not a distdiag report: no finding is as bad as {report.fail_on}")
    return report


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of report.json."""
    ranks = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    return msgspec.json.schema(Report, schema_hook=lambda kind: ranks)
