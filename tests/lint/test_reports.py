import json

import pytest

from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding, Related
from distdiag.lint.linting import LintResult
from distdiag.lint.reports import FORMATS
from distdiag.lint.rules import load_rules

FOUND = LintFinding(
    code="COL009",
    name="rank-guarded-collective",
    severity=Severity.ERROR,
    message="dist.barrier is 100% wrong\nhere",
    path="a,b:c.py",
    line=3,
    column=5,
    end_line=4,
    source="dist.barrier()",
    related=(Related("d.py", 2, "the condition"),),
)
NOTE = LintFinding(
    code="COL013",
    name="data-dependent-collective",
    severity=Severity.INFO,
    message="perhaps",
    path="z.py",
    line=1,
    column=1,
    end_line=1,
)
RESULT = LintResult((FOUND, NOTE), 2, {"bad.py": "bad.py: not valid Python"})
EMPTY = LintResult((), 1, {})


def test_text_has_a_line_for_each_finding_and_a_sum():
    assert FORMATS["text"](RESULT) == (
        "a,b:c.py:3:5: COL009 dist.barrier is 100% wrong\\nhere\n"
        "z.py:1:1: COL013 [info] perhaps\n"
        "found 1 error, 1 info in 2 files\n"
    )
    assert FORMATS["text"](EMPTY) == "nothing found in 1 file\n"


def test_json_holds_all_of_the_findings():
    document = json.loads(FORMATS["json"](RESULT))
    assert document["schema_version"] == 1
    assert document["num_files"] == 2
    assert document["not_checked"] == {"bad.py": "bad.py: not valid Python"}
    first = document["findings"][0]
    assert (first["code"], first["severity"], first["line"]) == ("COL009", "error", 3)
    assert first["related"] == [{"path": "d.py", "line": 2, "message": "the condition"}]


def test_github_gets_a_command_for_each_finding_with_its_signs_escaped():
    assert FORMATS["github"](RESULT).splitlines() == [
        "::error file=a%2Cb%3Ac.py,line=3,endLine=4,col=5,title=COL009 rank-guarded-collective"
        "::dist.barrier is 100%25 wrong%0Ahere",
        "::notice file=z.py,line=1,endLine=1,col=1,title=COL013 data-dependent-collective::perhaps",
        "::error file=bad.py,title=not linted::bad.py: not valid Python",
    ]
    assert FORMATS["github"](EMPTY) == ""


def test_sarif_has_the_rules_the_results_and_what_was_not_looked_at():
    log = json.loads(FORMATS["sarif"](RESULT))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(load_rules())
    assert [result["level"] for result in run["results"]] == ["error", "note"]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["region"] == {"startLine": 3, "startColumn": 5, "endLine": 4}
    assert place["artifactLocation"]["uri"] == "a%2Cb%3Ac.py"
    assert run["results"][0]["relatedLocations"][0]["message"] == {"text": "the condition"}
    (invocation,) = run["invocations"]
    assert not invocation["executionSuccessful"]
    assert len(invocation["toolExecutionNotifications"]) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_can_show_nothing(name):
    assert FORMATS[name](EMPTY).endswith("\n") or FORMATS[name](EMPTY) == ""
