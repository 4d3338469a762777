"""The file that keeps what a team knows."""

import json

import pytest

from distdiag.events.errors import UsageError
from distdiag.findings.baseline import baseline_of, encode_baseline, read_baseline, with_reasons
from distdiag.findings.finding import Location
from distdiag.findings.fingerprint import fingerprint_of
from tests.reports.samples import HOSTILE, filled_with, make_finding, make_warning


def test_what_is_written_is_read_with_each_finding_once(tmp_path):
    path = tmp_path / "known.json"
    baseline = baseline_of([make_warning(), make_finding(), make_finding()], tool_version="1")
    path.write_bytes(encode_baseline(baseline))
    assert read_baseline(path) == baseline
    assert [known.code for known in baseline.findings] == ["COL003", "COL010"]
    assert baseline.findings[0].place == "train.py:41"


def test_reasons_given_by_hand_are_kept():
    baseline = baseline_of([make_finding()], tool_version="1")
    kept = with_reasons(baseline, {fingerprint_of(make_finding()): "next quarter", "other": "x"})
    assert kept.reasons == {fingerprint_of(make_finding()): "next quarter"}


def test_no_folder_of_this_machine_gets_into_it():
    place = Location("/home/somebody/secret/train.py", 3, "main", "x()")
    text = encode_baseline(baseline_of([make_finding(location=place)], tool_version="1"))
    assert b"somebody" not in text


@pytest.mark.parametrize("text", HOSTILE)
def test_any_finding_can_be_known(tmp_path, text):
    path = tmp_path / "known.json"
    findings = filled_with(text).findings
    path.write_bytes(encode_baseline(baseline_of(findings, tool_version="1")))
    assert read_baseline(path).reasons.keys() == {fingerprint_of(each) for each in findings}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file"),
        (b"", "not a baseline"),
        (b"\xff", "not a baseline"),
        (b"[" * 100_000, "not a baseline"),
        (json.dumps({"schema_version": 1, "findings": []}).encode(), "not a baseline"),
        (b'{"baseline_version": 2}', "is of version 2, and this distdiag reads 1"),
        (b'{"baseline_version": 1, "findings": [{}]}', "not a baseline"),
    ],
)
def test_what_is_no_baseline_is_a_mistake_of_usage(tmp_path, content, problem):
    path = tmp_path / "known.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        read_baseline(path)
