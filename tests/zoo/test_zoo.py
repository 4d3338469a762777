"""Tests that every real bug is found where it is, and that its fix is not accused."""

from collections.abc import Iterator

import pytest

from tests.zoo.expectation import load_entries
from tests.zoo.run import run_entry_script

# Less than the test's own limit, so that the runner ends the processes and not pytest.
TIMEOUT_S = 100.0


def cases() -> Iterator[object]:
    """Every bug and every fix.

    Of bugs of one kind all but the first are slow tests, and so are comparisons of several runs. Of
    fixes all but the first of a family are.
    """
    kinds, families = set(), set()
    for entry in load_entries():
        expected = entry.expectation
        kind, family = expected.hang_class or expected.codes[0], expected.families[0]
        is_slow = kind in kinds or expected.mode == "parity"
        marks = [pytest.mark.slow] if is_slow or family in families else []
        yield pytest.param(entry, "fix", id=f"{entry.id}-fix", marks=marks)
        marks = [pytest.mark.slow] if is_slow else []
        if expected.missed:
            marks = [*marks, pytest.mark.xfail(reason=expected.missed, strict=True)]
        yield pytest.param(entry, "bug", id=f"{entry.id}-bug", marks=marks)
        kinds.add(kind)
        if not is_slow:
            families.add(family)


@pytest.mark.zoo
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("entry", "name"), list(cases()))
def test_the_bug_is_found_and_the_fix_is_silent(entry, name):
    result = run_entry_script(entry, name, "distdiag", TIMEOUT_S)
    assert result.score.passed, f"{result.score.reason}\n{result.log_tail}"
