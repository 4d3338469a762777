"""The root of the repository holds what its layout names, and nothing that a run left there."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYOUT = {
    *(".ci", ".gitignore", ".pre-commit-hooks.yaml"),
    *("CHANGELOG.md", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"),
    *("configs", "distdiag", "docs", "launchers", "scripts", "tests"),
}


def test_the_root_holds_nothing_that_a_run_left_behind() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git: nothing tells what is kept")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tops = {path.split("/")[0] for path in listed.stdout.split("\0") if path}
    assert tops == LAYOUT
