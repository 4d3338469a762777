"""Tests that every real bug is found where it is, and that its fix is not accused."""

import pytest

from tests.zoo.expectation import load_entries
from tests.zoo.run import run_entry_script

# Less than the test's own limit, so that the runner ends the processes and not pytest.
TIMEOUT_S = 100.0


@pytest.mark.zoo
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["bug", "fix"])
@pytest.mark.parametrize("entry", load_entries(), ids=lambda entry: entry.id)
def test_the_bug_is_found_and_the_fix_is_silent(entry, name):
    result = run_entry_script(entry, name, "distdiag", TIMEOUT_S)
    assert result.score.passed, f"{result.score.reason}\n{result.log_tail}"
