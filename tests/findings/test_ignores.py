"""Findings that do not count: by a comment, by the configuration, by a baseline."""

import pytest

from distdiag.config.ignores import IgnoreRule
from distdiag.findings.finding import Location
from distdiag.findings.fingerprint import fingerprint_of
from distdiag.findings.ignores import Ignores, ignore_comment
from tests.reports.samples import make_finding, make_warning


def split(finding, **told):
    """Return whether a finding counts, by what it is ignored, and why."""
    standing, ignored = Ignores(**told).split([finding])
    assert len(standing) + len(ignored) == 1
    return [(each.by, each.reason) for each in ignored]


def in_file(tmp_path, text, line):
    """Return a finding at a line of a file that holds this text."""
    file = tmp_path / "train.py"
    file.write_text(text)
    source = text.splitlines()[line - 1].strip()
    return make_finding(location=Location(str(file), line, "main", source))


@pytest.mark.parametrize(
    ("line", "wanted", "reason"),
    [
        ("x()  # distdiag: ignore[COL003] because", {"col003"}, "because"),
        ("x()  # distdiag: ignore[COL003]: because", {"col003"}, "because"),
        ("x()  # distdiag: ignore[COL003, BAR001] - it is so", {"col003", "bar001"}, "it is so"),
        ("x()  # noqa # distdiag: ignore[a-name] yes # other", {"a-name"}, "yes"),
        ("x()  # distdiag: ignore[COL003]", {"col003"}, ""),
        ("x()  # distdiag: ignore[] why", set(), "why"),
        ("x()  # distdiag: ignore", set(), ""),
    ],
)
def test_a_comment_names_checks_and_a_reason(line, wanted, reason):
    comment = ignore_comment(line)
    assert (comment.wanted, comment.reason) == (wanted, reason)


@pytest.mark.parametrize("line", ["x()", "x()  # distdiag ignore[COL003] y", "# ignore[COL003] y"])
def test_other_comments_say_nothing(line):
    assert ignore_comment(line) is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x()  # distdiag: ignore[COL003] meant\n", 1),
        ("f(\n  a,\n  b,  # distdiag: ignore[collective-shape-mismatch] meant\n)\n", 1),
        ("f(\n  a,\n)  # distdiag: ignore[COL003] meant\n", 2),
        ("if f(a):  # distdiag: ignore[COL003] meant\n    g()\n", 1),
    ],
)
def test_a_comment_on_a_line_of_the_statement_ignores(tmp_path, text, line):
    assert split(in_file(tmp_path, text, line)) == [("comment", "meant")]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x()\ny()  # distdiag: ignore[COL003] meant\n", 1),
        ("if f(a):\n    g()  # distdiag: ignore[COL003] meant\n", 1),
        ("x()  # distdiag: ignore[COL004] meant\n", 1),
        ("x()  # distdiag: ignore meant\n", 1),
    ],
)
def test_a_comment_elsewhere_or_of_another_check_does_not(tmp_path, text, line):
    assert split(in_file(tmp_path, text, line)) == []


def test_a_comment_without_a_reason_does_not_count_and_the_finding_says_so(tmp_path):
    finding = in_file(tmp_path, "x()  # distdiag: ignore[COL003]\n", 1)
    (standing,), ignored = Ignores().split([finding])
    assert ignored == ()
    note = standing.evidence[-1]
    assert "gives no reason, so the finding counts" in note.summary
    (again,), _ = Ignores().split([standing])  # a report is judged more than once
    assert again == standing


def test_a_file_that_cannot_be_read_is_known_by_the_line_of_the_finding():
    source = "x()  # distdiag: ignore[COL003] meant"
    finding = make_finding(location=Location("/gone/train.py", 3, "main", source))
    assert split(finding) == [("comment", "meant")]


def test_a_file_that_has_changed_since_does_not_speak_for_its_line(tmp_path):
    finding = in_file(tmp_path, "x()\n", 1)
    (tmp_path / "train.py").write_text("y()  # distdiag: ignore[COL003] meant\n")
    assert split(finding) == []


@pytest.mark.parametrize(
    "rule",
    [
        {"codes": ("COL003",)},
        {"codes": ("REP", "COL")},
        {"codes": ("COL003",), "path": "train.py"},
        {"codes": ("COL003",), "path": "src/*.py"},
        {"codes": ("COL003",), "path": "/a/src/train.py"},
        {"codes": ("COL003",), "subject": "default_*"},
        {"codes": ("COL003",), "path": "*train.py", "subject": "default_pg"},
    ],
)
def test_a_rule_ignores_what_fits_all_of_it(rule):
    finding = make_finding(location=Location("/a/src/train.py", 3, "main", "x()"))
    rules = [IgnoreRule(**rule, reason="so")]
    assert split(finding, rules=rules) == [("configuration", "so")]


@pytest.mark.parametrize(
    "rule",
    [
        {"codes": ("COL004",)},
        {"codes": ("COL003",), "path": "rain.py"},
        {"codes": ("COL003",), "path": "eval/*.py"},
        {"codes": ("COL003",), "subject": "default"},
    ],
)
def test_a_rule_leaves_what_does_not_fit(rule):
    finding = make_finding(location=Location("/a/src/train.py", 3, "main", "x()"))
    assert split(finding, rules=[IgnoreRule(**rule, reason="so")]) == []


def test_a_rule_for_files_or_subjects_does_not_fit_a_finding_without_them():
    for more in ({"path": "*.py"}, {"subject": "?*"}):
        rule = IgnoreRule(codes=("COL010",), reason="so", **more)
        assert split(make_warning(), rules=[rule]) == []


def test_a_baseline_knows_findings_by_their_fingerprints():
    finding = make_finding()
    known = {fingerprint_of(finding): "later"}
    assert split(finding, baseline=known) == [("baseline", "later")]
    assert split(make_warning(), baseline=known) == []
