"""Forms of the report for other programs: what they say, and that no content breaks out of them."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from distdiag.checks import load_checks
from distdiag.config.ignores import IgnoreRule
from distdiag.findings.finding import Outcome, Severity
from distdiag.findings.ignores import Ignores
from distdiag.reports import load_reporter
from distdiag.reports.base import append_to_its_file
from distdiag.reports.gate import Gate
from tests.reports.samples import (
    HOSTILE,
    filled_with,
    make_finding,
    make_note,
    make_report,
    make_run,
    make_warning,
)
from tests.reports.sarif_model import read_log

NAMES = ("github", "json", "junit", "markdown", "sarif", "terminal")
RULE = IgnoreRule(codes=("COL010",), reason="the optimizer waits for it")


def render(name, report):
    return load_reporter(name)().render(report)


# GitHub Actions.


def test_each_finding_is_an_annotation_and_the_worst_comes_first():
    report = make_report(make_note(), make_warning(), make_finding())
    error, warning, note = render("github", report).splitlines()
    assert error == (
        "::error file=train.py,line=41,title=COL003 collective-shape-mismatch::all_gather #12 has "
        "shape [4, 8] on rank 0 and [3, 8] on rank 1 [rank 1]"
        "%0AFix: Drop the last incomplete batch."
    )
    # A finding without a place stands at the script.
    assert warning.startswith("::warning file=train.py,title=COL010 unwaited-work::the Work")
    assert note.startswith("::notice file=train.py,line=41,title=REP003 noted::")


def test_a_file_below_the_workspace_is_named_from_there(monkeypatch, tmp_path):
    location = make_finding().location
    place = type(location)(f"{tmp_path}/src/train.py", 3, "main", "x()")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert "file=src/train.py,line=3," in render(
        "github", make_report(make_finding(location=place))
    )
    log = read_log(render("sarif", make_report(make_finding(location=place))))
    place = log.runs[0].results[0].locations[0].physical_location
    assert (place.artifact_location.uri, place.region.start_line) == ("src/train.py", 3)


def test_what_is_ignored_is_counted_and_not_annotated():
    gate = Gate(ignores=Ignores([RULE]))
    text = render("github", make_report(make_warning(), gate=gate))
    assert text == "distdiag: 1 ignored and 0 known findings\n"


def test_the_summary_of_the_job_gets_the_markdown(monkeypatch, tmp_path):
    report = make_report(make_finding())
    assert load_reporter("github")().append(report) is None
    summary = tmp_path / "summary"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    append_to_its_file(load_reporter("github")(), report)
    assert summary.read_text() == "before\n" + render("markdown", report)


# SARIF.


def test_a_log_has_results_rules_fingerprints_and_what_was_not_looked_at():
    gate = Gate(ignores=Ignores([RULE]))
    report = make_report(make_finding(), make_note(), make_warning(), gate=gate)
    (run,) = read_log(render("sarif", report)).runs
    assert [(r.rule_id, r.level) for r in run.results] == [
        ("COL003", "error"),
        ("REP003", "note"),
        ("COL010", "warning"),
    ]
    first, _, ignored = run.results
    assert first.partial_fingerprints == {"distdiag/v1": report.findings[0].fingerprint}
    assert len(first.related_locations) == 2
    assert [s.justification for s in ignored.suppressions] == [RULE.reason]
    assert {rule.id for rule in run.tool.driver.rules} == {"COL003", "COL010", "REP003"}
    (invocation,) = run.invocations
    assert invocation.execution_successful
    assert [n.message.text for n in invocation.tool_execution_notifications] == [
        "MOE001: no choice of experts was seen",
        "rank 3: not observed",
    ]


def test_a_run_that_failed_was_no_successful_execution():
    report = make_report(run=make_run(Outcome.HUNG))
    (run,) = read_log(render("sarif", report)).runs
    assert not run.invocations[0].execution_successful


# JUnit.


def suite_of(report):
    """Return the only suite of a document, whose form is that of Jenkins' schema junit-10.xsd."""
    root = ElementTree.fromstring(render("junit", report))
    assert (root.tag, root.attrib) == ("testsuites", {"name": "distdiag"})
    (suite,) = root
    assert suite.tag == "testsuite"
    assert set(suite.keys()) >= {"name", "tests", "failures", "errors"}
    allowed = {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"}
    assert set(suite.keys()) <= allowed
    assert {child.tag for child in suite} <= {"testcase", "system-out"}
    for case in suite.findall("testcase"):
        assert set(case.keys()) == {"name", "classname", "time"}
        assert {child.tag for child in case} <= {"failure", "skipped", "system-out"}
        for child in case:
            assert set(child.keys()) <= {"type", "message"}
            assert len(child) == 0
    return suite


def outcomes_of(suite):
    """Return by name what became of each test."""
    return {
        case.get("name"): next((child.tag for child in case), "passed")
        for case in suite.findall("testcase")
    }


def test_each_check_is_a_test_that_passed_failed_or_was_skipped():
    suite = suite_of(make_report(make_finding(), make_finding(), make_warning()))
    assert outcomes_of(suite) == {
        "the run": "passed",
        "COL001 missing-from-collective": "passed",
        "COL003 collective-shape-mismatch": "failure",
        "COL010 unwaited-work": "system-out",  # a warning does not make this run fail
        f"MOE001 {load_checks()['MOE001'].name}": "skipped",
    }
    counts = [suite.get(key) for key in ("tests", "failures", "skipped")]
    assert counts == ["5", "1", "1"]
    (case,) = (c for c in suite.findall("testcase") if c.get("name").startswith("COL003"))
    assert len(case.findall("failure")) == 2
    assert "  rank 1: called it with [3, 8] (train.py:41)" in case.find("failure").text
    assert "rank 3: not observed" in suite.find("system-out").text


def test_a_warning_fails_its_test_where_it_fails_the_run():
    report = make_report(make_warning(), gate=Gate("warning"))
    assert outcomes_of(suite_of(report))["COL010 unwaited-work"] == "failure"


def test_a_script_that_failed_is_a_failed_test():
    suite = suite_of(make_report(run=make_run(Outcome.FAILED, exit_status=3)))
    assert outcomes_of(suite)["the run"] == "failure"
    assert suite.find("testcase/failure").get("message") == "the run: failed; exit status 3"


# Markdown.


def test_a_comment_has_every_part_of_a_diagnosis(snapshot):
    gate = Gate(ignores=Ignores([RULE]))
    report = make_report(make_note(), make_finding(), make_warning(), gate=gate)
    assert render("markdown", report) == snapshot


def test_a_clean_run_is_two_lines(snapshot):
    assert render("markdown", make_report()) == snapshot


def test_a_comment_never_grows_beyond_what_a_code_host_takes():
    findings = [make_finding(message=f"{n} " + "x" * 1400) for n in range(200)]
    text = render("markdown", make_report(*findings))
    assert len(text) < 65_536
    assert re.search(r"\*\d+ more parts are in report\.json\.\*\n$", text)


# All of them.


@pytest.mark.parametrize("name", NAMES)
def test_a_form_ends_with_a_newline_or_is_empty(name):
    for report in (make_report(), make_report(make_finding(), make_note())):
        text = render(name, report)
        assert text == "" or text.endswith("\n")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_content_breaks_out_of_a_form(text):
    assert_harmless(filled_with(text))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30)), max_size=4))
def test_no_mixture_of_contents_breaks_out_of_a_form(parts):
    assert_harmless(filled_with("".join(parts)))


UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def assert_harmless(report):
    texts = {name: render(name, report) for name in NAMES}
    for text in texts.values():
        text.encode()
    for line in texts["github"].splitlines():
        assert re.match(r"::(error|warning|notice) [^:]*::|distdiag: ", line), line
        assert line.isprintable()
    assert len(texts["github"].splitlines()) == len(report.findings) + 1
    assert len(read_log(texts["sarif"]).runs[0].results) == 4
    suite_of(report)
    assert_plain_markdown(texts["markdown"])
    assert all(line.isprintable() for line in texts["terminal"].split("\n"))
    for name in ("json", "junit", "sarif", "markdown"):
        assert not UNSEEN.search(texts[name]), name


def assert_plain_markdown(text):
    """Find no element in the HTML of a comment that this form does not write itself."""
    html = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(text)
    tags = set(re.findall(r"</?([A-Za-z!][\w-]*)", re.sub(r"<!-- -->", "", html)))
    own = {"h2", "h3", "p", "strong", "em", "ul", "li", "code", "pre", "details", "summary"}
    assert tags <= own, html
    shown = re.sub(r"<(code|pre).*?</\1>", "", html, flags=re.S)
    assert not re.search(r"[@#]\w", shown), html


def test_megabytes_in_every_field_stay_small_and_quick():
    report = filled_with("<\x1b\n" * 3_400_000)  # 10 MB
    for name in ("github", "junit", "markdown", "sarif"):
        assert len(render(name, report)) < 1_000_000, name


@pytest.mark.parametrize("name", ["github", "junit", "markdown", "sarif"])
def test_of_very_many_findings_a_form_holds_what_it_can(name):
    some, many = (
        render(name, make_report(*(make_finding(subjects=(f"{n}",)) for n in range(number))))
        for number in (1000, 2000)
    )
    assert len(many) < 1.1 * len(some)


def test_the_severity_of_an_annotation_is_a_word_of_github():
    for severity, word in zip(Severity, ("error", "warning", "notice"), strict=True):
        text = render("github", make_report(make_finding(severity=severity)))
        assert text.startswith(f"::{word} ")
