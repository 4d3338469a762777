"""Tests that every real bug is found where it is, and that its fix is not accused."""

from collections.abc import Iterator

import pytest

from tests.zoo.expectation import load_entries
from tests.zoo.run import run_entry_script

# Less than the test's own limit, so that the runner ends the processes and not pytest.
TIMEOUT_S = 100.0


def cases() -> Iterator[object]:
    """Every fix, and one bug of each family and kind of hang; in the long form all, twice."""
    kinds = set()
    for entry in load_entries():
        expected = entry.expectation
        kind = expected.hang_class or expected.families[0]
        is_slow = kind in kinds or expected.mode == "parity"
        kinds.add(kind)
        is_missed = pytest.mark.xfail(reason=expected.missed, strict=True)
        for name, launcher, slow in (
            ("fix", "forked", False),
            ("bug", "forked", is_slow),
            ("fix", "torchrun", True),
            ("bug", "torchrun", True),
        ):
            marks = [pytest.mark.slow] * slow + [is_missed] * bool(
                expected.missed and name == "bug"
            )
            if entry.missing:
                marks.append(pytest.mark.skip(reason=f"needs {', '.join(entry.missing)}"))
            yield pytest.param(
                entry, name, launcher, id=f"{entry.id}-{name}-{launcher}", marks=marks
            )


@pytest.mark.zoo
@pytest.mark.timeout(420)
@pytest.mark.parametrize(("entry", "name", "launcher"), list(cases()))
def test_the_bug_is_found_and_the_fix_is_silent(entry, name, launcher):
    result = run_entry_script(entry, name, "distdiag", TIMEOUT_S, launcher)
    assert result.score.passed, f"{result.score.reason}\n{result.log_tail}"
