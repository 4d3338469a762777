"""Every wrong implementation is found with the exact tokens, and every right one is silent."""

import json
from pathlib import Path

import pytest

from tests.integration.launch import run_plain
from tests.sequence.implementations import LENGTH, RIGHT, WRONG, Case

SCRIPT = Path(__file__).with_name("run_all.py")
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def verdicts():
    """The faults of all implementations, by the number of ranks."""
    known = {}

    def of(ranks):
        if ranks not in known:
            outcome = run_plain(SCRIPT, nproc=ranks, timeout=250)
            assert outcome.exit_status == 0, outcome.describe()
            (line,) = [each for each in outcome.stdout.splitlines() if each.startswith("FOUND ")]
            known[ranks] = json.loads(line.removeprefix("FOUND "))
        return known[ranks]

    return of


def named(case):
    return case.name


def expected_tokens(case: Case, ranks):
    tokens = case.tokens(ranks)
    if case.is_flat:
        return tokens
    length, batch = case.options.get("length", LENGTH), case.options.get("batch", 2)
    return {row * length + token for row in range(batch) for token in tokens}


def test_there_are_as_many_as_promised():
    assert len(RIGHT) >= 10
    assert len(WRONG) >= 30
    assert len({case.name for case in (*RIGHT, *WRONG)}) == len(RIGHT) + len(WRONG)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", RIGHT, ids=named)
def test_what_is_right_is_silent(case, ranks, verdicts):
    assert verdicts(ranks)[case.name] == []


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", WRONG, ids=named)
def test_what_is_wrong_is_found_with_its_tokens_and_ranks(case, ranks, verdicts):
    faults = verdicts(ranks)[case.name]
    assert {fault["kind"] for fault in faults} == {kind.value for kind in case.kinds}
    assert {fault["grade"] for fault in faults} == {"proven"}
    exact = [fault for fault in faults if fault["kind"] in case.kinds[: case.num_exact]]
    assert {token for fault in exact for token in fault["tokens"]} == expected_tokens(case, ranks)
    assert {rank for fault in faults for rank in fault["ranks"]} == case.culprits(ranks)
