"""The command ``distdiag`` as a person meets it: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.checks import load_checks
from distdiag.findings.finding import Outcome, Report, Run
from distdiag.findings.known_faults import known_faults
from distdiag.lint.rules import load_rules
from distdiag.reports import load_reporter, write_report
from tests import forked

ROOT = Path(__file__).parents[2]
REPORT = Report(
    complete=True,
    run=Run(
        id="r",
        command=("train.py", "日本"),
        world_size=2,
        ranks=(),
        torch="2.13.0",
        started="2026-01-01T00:00:00Z",
        ended="2026-01-01T00:00:01Z",
        outcome=Outcome.FINISHED,
    ),
    checked=("COL001",),
    exit_status=0,
)


@pytest.fixture
def distdiag(tmp_path):
    """Return a function that runs the command in an empty directory."""

    def run(*arguments, **environ):
        if not environ:  # variables may say what Python reads when it starts
            return forked.run(["-m", "distdiag.cli", *arguments], timeout=280, cwd=tmp_path)
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return subprocess.run(
            [sys.executable, "-m", "distdiag.cli", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": paths} | environ,
            capture_output=True,
            encoding="utf-8",
            timeout=280,
        )

    return run


@pytest.mark.parametrize("package", ["distdiag", "distdiag.cli"])
def test_the_package_is_the_command(package, tmp_path):
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

    def ask(*arguments):
        return subprocess.run(
            [sys.executable, "-m", package, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            encoding="utf-8",
            timeout=100,
        )

    usage = f"Usage: python -m {package}"
    assert ask("--help").stdout.startswith(f"{usage} [OPTIONS] COMMAND [ARGS]...")
    assert ask("explain", "--help").stdout.startswith(f"{usage} explain [OPTIONS]")
    assert "silent-rank" in ask("explain", "DIA002").stdout
    mistake = ask("zzz")
    assert (mistake.returncode, mistake.stderr) == (2, "distdiag: No such command 'zzz'.\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("zzz",), "No such command 'zzz'"),
        (("--bogus",), "No such option"),
        (("check",), "Missing argument 'SCRIPT'"),
        (("check", "--bogus", "train.py"), "No such option"),
        (("check", "gone.py"), "script 'gone.py' does not exist"),
        (("check", "--profile", "x", "train.py"), "Invalid value for '--profile'"),
        (("check", "--nproc-per-node", "0", "train.py"), "'0' is not a positive number"),
        (("check", "--nproc-per-node", "two", "train.py"), "'two' is not a positive number"),
        (("check", "--select", "XYZ", "train.py"), 'unknown code or prefix "XYZ"'),
        (("check", "--report", "pdf", "train.py"), 'unknown report "pdf"'),
        (("check", "--report", "sarif,pdf", "train.py"), 'unknown report "pdf"'),
        (("check", "--report", "sarif", "--report", "pdf", "train.py"), 'unknown report "pdf"'),
        (("check", "--baseline", "gone.json", "train.py"), "gone.json: cannot be read"),
        (("check", "--baseline", "train.py", "train.py"), "train.py: not a baseline"),
        (("check", "--config", "rule.toml", "train.py"), 'unknown code or prefix "XYZ"'),
        (("baseline", "gone"), "gone: cannot be read"),
        (("baseline",), "there is no run below ./distdiag-runs"),
        (("check", "--config", "gone.toml", "train.py"), "gone.toml: cannot be read"),
        (("check", "--config", "bad.toml", "train.py"), "bad.toml: unknown key 'profil'"),
        (("check", "--run-dir", "train.py/x", "train.py"), "train.py/x cannot be written"),
        (("check", "--run-dir", "used", "train.py"), "used already holds a run"),
        (("report",), "there is no run below ./distdiag-runs"),
        (("report", "gone"), "gone: cannot be read: No such file"),
        (("report", "."), "report.json: cannot be read: No such file"),
        (("report", "train.py"), "train.py: not a distdiag report"),
        (("report", "--report", "pdf", "used"), 'unknown report "pdf"'),
        (("explain",), "Missing argument 'CODE'"),
        (("explain", "ZZZ999"), 'unknown code "ZZZ999"'),
    ],
)
def test_a_mistake_is_one_line_and_status_2(distdiag, tmp_path, arguments, problem):
    (tmp_path / "train.py").write_text("raise SystemExit('never started')\n")
    (tmp_path / "bad.toml").write_text("profil = 'deep'\n")
    (tmp_path / "rule.toml").write_text("[[ignore]]\ncodes = ['XYZ']\nreason = 'none'\n")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "run.json").touch()
    done = distdiag(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("distdiag: ")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_command(distdiag, arguments):
    done = distdiag(*arguments)
    assert done.returncode == 0
    for command in ("check", "demo", "explain", "list", "report", "schema"):
        assert f"\n  {command} " in done.stdout


def test_help_of_check_names_every_option(distdiag):
    done = distdiag("check", "--help")
    assert done.returncode == 0
    for option in ("--profile", "--select", "--hang-timeout", "--on-hang", "--strict", "--run-dir"):
        assert option in done.stdout


def test_the_version_is_reported(distdiag):
    done = distdiag("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "distdiag")


def test_the_list_has_a_line_for_each_check(distdiag):
    done = distdiag("list")
    assert done.returncode == 0
    codes = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert codes == sorted({**load_checks(), **load_rules()})
    static = {line.split()[0] for line in done.stdout.splitlines() if "  static: " in line}
    assert static == load_rules().keys() - load_checks().keys()


def test_known_faults_are_listed_and_explained(distdiag):
    done = distdiag("list", "--known-faults")
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert names == [row.id for row in known_faults()]
    page = distdiag("explain", "nccl-shm-full").stdout
    assert page.startswith("nccl-shm-full (known fault, of the machine)\n\n/dev/shm is full")
    assert "--shm-size" in page and "- https://docs.nvidia.com/" in page
    assert "(did you mean nccl-shm-full" in distdiag("explain", "nccl-shm-ful").stderr


def test_a_family_is_listed_by_its_first_letters(distdiag):
    lines = distdiag("explain", "hng").stdout.splitlines()
    assert len(lines) > 10
    assert all(line.startswith("HNG") for line in lines)


@pytest.mark.parametrize("options", [(), ("--known-faults",)])
def test_lists_can_be_read_by_programs(distdiag, options):
    rows = json.loads(distdiag("list", "--json", *options).stdout)
    assert len(rows) == len(distdiag("list", *options).stdout.splitlines()) - 1
    assert all(row["name"] for row in rows)


def test_each_check_explains_itself_by_code_or_name(distdiag):
    checks = list(load_checks().values())
    assert checks
    check = checks[0]
    by_code = distdiag("explain", check.code.lower())
    assert by_code.returncode == 0
    assert by_code.stdout.startswith(f"{check.code} {check.name} ({check.severity})\n\n")
    assert "How to fix" in by_code.stdout
    assert distdiag("explain", check.name).stdout == by_code.stdout


def test_an_unknown_code_brings_close_matches(distdiag):
    code = next(iter(load_checks()))
    assert f"(did you mean {code[:3]}" in distdiag("explain", code[:-1] + "X").stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_finds_the_sick_script_and_only_that(distdiag):
    done = distdiag("demo", OMP_NUM_THREADS="1")
    assert done.returncode == 0
    healthy, sick = done.stdout.split("demo: sick.py, ")
    assert "nothing found; the run finished" in healthy
    assert "\nERROR " in sick
    assert done.stdout.endswith("demo: went as it should\n")


def test_the_schema_describes_the_report(distdiag):
    schema = json.loads(distdiag("schema").stdout)
    properties = schema["$defs"]["Report"]["properties"]
    assert {"schema_version", "run", "findings", "checked", "not_checked"} <= properties.keys()
    assert properties["silent_ranks"]["items"] == {"type": "integer", "minimum": 0}
    assert {"tool_version", "counts", "fail_on", "exit_status", "ignored"} <= properties.keys()
    assert "fingerprint" in schema["$defs"]["Finding"]["properties"]
    assert schema["$defs"]["IgnoredFinding"]["properties"]["by"]["enum"] == [
        "baseline",
        "comment",
        "configuration",
    ]
    old = {"tool_version", "counts", "fail_on", "exit_status", "ignored", "schema_version"}
    assert not old & set(schema["$defs"]["Report"]["required"])  # older reports fit, too


@pytest.mark.parametrize("name", ["terminal", "json"])
def test_a_report_is_shown_again_from_its_file_or_directory(distdiag, tmp_path, name):
    write_report(tmp_path / "report.json", REPORT)
    from_file = distdiag("report", "report.json", "--report", name)
    assert from_file.returncode == 0
    assert from_file.stdout == load_reporter(name)().render(REPORT)
    assert distdiag("report", ".", "--report", name).stdout == from_file.stdout


def test_a_terminal_without_the_letters_still_gets_the_report(distdiag, tmp_path):
    write_report(tmp_path / "report.json", REPORT)
    done = distdiag("report", ".", "--verbose", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0
    assert "\\u65e5\\u672c" in done.stdout


def test_every_command_has_help_and_is_listed(distdiag):
    listed = distdiag("--help").stdout.partition("Commands:\n")[2].split("\n  ")
    names = [line.split()[0] for line in listed]
    assert names == sorted(names) and {"check", "list", "moe-determinism"} <= set(names)
    for name in names:
        assert distdiag(name, "--help").stdout.startswith("Usage: "), name


def test_what_every_rank_loads_of_the_commands_is_small():
    program = "import sys, distdiag.cli.options; print('distdiag.engine' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        timeout=100,
    )
    assert done.stdout == "False\n", done.stderr
