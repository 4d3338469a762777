"""scripts/new_check.py makes both forms of a check, ready to be filled in."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def copy(tmp_path):
    for folder in ("distdiag", "scripts", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def new_check(copy, *arguments):
    command = [sys.executable, str(copy / "scripts" / "new_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def explain(copy, code):
    command = [sys.executable, "-m", "distdiag.cli", "explain", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=copy, timeout=60).stdout


@pytest.mark.parametrize(
    ("options", "written"),
    [
        (("--view", "OptimizerView"), ["checks/shd/huge_step.py"]),
        (
            ("--fact", "step-sizes"),
            [
                "checks/shd/huge_step.py",
                "engine/step_sizes.py",
                "events/step_sizes.py",
                "probes/step_sizes/__init__.py",
            ],
        ),
    ],
    ids=["view", "fact"],
)
def test_what_it_writes_is_found_and_linted(copy, options, written):
    ended = new_check(copy, "SHD900", "huge-step", *options)
    assert ended.returncode == 0, ended.stderr
    paths = sorted(line.removeprefix("wrote ") for line in ended.stdout.splitlines()[:-1])
    sources = [path for path in paths if path.startswith("distdiag/")]
    assert sources == [f"distdiag/{path}" for path in written]
    assert {*paths} - {*sources} == {"docs/checks.md", "tests/checks/shd/test_huge_step.py"}
    assert "| SHD900 | huge-step |" in (copy / "docs" / "checks.md").read_text()
    assert "huge-step" in explain(copy, "SHD900")
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    if ruff is not None:
        for command in (["check"], ["format", "--check"]):
            checked = subprocess.run(
                [ruff, *command, *sources], capture_output=True, text=True, cwd=copy, timeout=60
            )
            assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("SHD1", "huge-step"), "is not three capital letters and three digits"),
        (("SHD900", "Huge"), "is not the defect in kebab-case"),
        (("COL001", "huge-step"), "a code never changes its meaning"),
        (("SHD900", "missing-from-collective"), "is taken by COL001"),
        (("SHD900", "huge-step", "--view", "NoView"), "distdiag/views has no NoView"),
        (("SHD900", "huge-step", "--view", "PatternView"), "distdiag/views has no PatternView"),
        (("ABC900", "huge-step"), "there is no family ABC"),
        (("SHD900", "huge-step", "--fact", "collectives"), "collectives exists already"),
        (("SHD900", "huge-step", "--fact", "StepSizes"), "is not in kebab-case"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(copy, arguments, said):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.*")}
    ended = new_check(copy, *arguments)
    assert ended.returncode == 2
    assert said in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.*")} == before
