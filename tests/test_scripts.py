"""The scripts that measure find what they import, whatever is moved in the package."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
LOADING = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='loaded')"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_finds_what_it_imports(script):
    # As Python does when it starts a script.
    command = [sys.executable, "-c", f"import sys; sys.path[0] = {str(SCRIPTS)!r}; {LOADING}"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
