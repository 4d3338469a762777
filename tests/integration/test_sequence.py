"""A program that splits its sequences, verified under the agent before it trains."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked, run_plain

SCRIPT = Path(__file__).with_name("sequenced.py")
FAMILY = ["SEQ001", "SEQ002", "SEQ003", "SEQ004"]

pytestmark = pytest.mark.timeout(300)


def run(way, *options, nproc=2):
    outcome = run_checked(SCRIPT, [way], options=["--fail-on", "never", *options], nproc=nproc)
    assert outcome.exit_status == 0, outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    assert outcome.stdout.count("loss ") == nproc, outcome.describe()
    return outcome


def found(outcome):
    return [(f["code"], f["ranks"]) for f in outcome.alarms if f["code"] in FAMILY]


def line_of(text):
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_what_is_marked_is_verified_and_the_run_stays_the_same():
    checked = run("marked", "--verify-sequence")
    assert sorted(checked.stdout.splitlines()) == sorted(
        run_plain(SCRIPT, ["marked"]).stdout.splitlines()
    )
    assert checked.alarms == [], checked.describe()
    assert checked.report["run"]["active_modes"] == ["verify-sequence"]
    assert set(FAMILY) <= set(checked.report["checked"])


def test_a_part_that_begins_late_is_named_at_the_function():
    outcome = run("late", "--verify-sequence")
    assert found(outcome) == [("SEQ001", [0]), ("SEQ001", [0])], outcome.describe()
    assert {f["location"]["line"] for f in outcome.alarms} == {line_of("def split")}
    assert "token 0 came to no rank" in outcome.alarms[0]["message"]


def test_functions_that_the_table_names(tmp_path):
    config = tmp_path / "sequence.toml"
    config.write_text(
        'verify_sequence = true\n[sequence]\nsplit = ["__main__:split"]\n'
        'gather = ["__main__:gather"]\nattention = ["__main__:mean_of_all"]\ncausal = true\n'
    )
    outcome = run("reversed", "--config", str(config))
    wanted = [("SEQ002", [0, 1]), ("SEQ004", [0]), ("SEQ004", [1])]
    assert found(outcome) == wanted, outcome.describe()


def test_a_function_that_is_not_there_is_no_harm(tmp_path):
    config = tmp_path / "sequence.toml"
    config.write_text('[sequence]\nsplit = ["__main__:cut"]\ngather = ["__main__:gather"]\n')
    outcome = run("plain", "--verify-sequence", "--config", str(config))
    assert outcome.alarms == [], outcome.describe()
    (off,) = {f["subjects"][0] for f in outcome.report["findings"] if f["code"] == "DIA003"}
    assert off == "verify-sequence"
    assert set(FAMILY) <= set(outcome.report["not_checked"])


@pytest.mark.slow
def test_without_the_flag_nothing_is_sent():
    outcome = run("late")
    assert found(outcome) == []
    assert "--verify-sequence" in outcome.report["not_checked"]["SEQ001"]


@pytest.mark.slow
def test_a_person_may_ask_in_the_script():
    outcome = run("asked")
    assert outcome.stdout.count("asked: False") == 2, outcome.describe()
    assert found(outcome) == [("SEQ003", [0, 1])], outcome.describe()


@pytest.mark.slow
@pytest.mark.parametrize(("way", "wanted"), [("marked", []), ("late", [[0], [0], [2], [2]])])
def test_groups_of_two_among_four_ranks_are_found_by_their_use(way, wanted):
    outcome = run(way, "--verify-sequence", nproc=4)
    assert sorted(ranks for _, ranks in found(outcome)) == wanted, outcome.describe()
