"""How rules of a plan are written, and what they ask for."""

import pytest

from distdiag.config.placement_rules import rules_of


def rule(text, pattern="w"):
    (found,) = rules_of({pattern: text})
    return found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Shard(0) over ep", {"ep": "S(0)", "tp": None}),
        ("Shard(-1) over tp", {"tp": "S(2)"}),
        ("Replicate over *", {"ep": "R", "anything": "R"}),
        ("Replicate() over dp_shard", {"dp_shard": "R", "tp": None}),
        ("Shard(0) over dp, Shard(1)  over tp", {"dp": "S(0)", "tp": "S(1)"}),
        ("Shard(0) over ep,Replicate over *", {"ep": "S(0)", "dp": "R"}),
    ],
)
def test_what_a_rule_wants_over_each_axis(text, wanted):
    assert {axis: rule(text).wanted(axis, 3) for axis in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected"),
        ("Shard(0)", "expected"),
        ("shard(0) over ep", "expected"),
        ("Shard(x) over ep", "expected"),
        ("Partial over ep", "expected"),
        ("Shard(0) over ep,", "expected"),
        ("Shard(0) over *", "Shard needs the name of one axis, got 'Shard(0) over *'"),
        ("Shard(0) over ep, Replicate over ep", "the axis ep is given twice"),
    ],
)
def test_what_is_no_rule_is_reported_with_its_key(text, problem):
    with pytest.raises(ValueError) as caught:
        rule(text, "a.*")
    assert str(caught.value).startswith(f'key "plan.a.*": {problem}')


@pytest.mark.parametrize(
    ("one", "other", "axis"),
    [
        ("Shard(0) over ep", "Shard(1) over ep", "ep"),
        ("Shard(0) over ep", "Shard(-3) over ep", None),
        ("Shard(0) over ep", "Shard(0) over tp", None),
        ("Replicate over *", "Shard(0) over tp", "tp"),
        ("Replicate over *", "Replicate over tp", None),
        ("Shard(0) over ep, Replicate over *", "Shard(0) over ep", None),
    ],
)
def test_over_which_axis_two_rules_disagree(one, other, axis):
    assert rule(one).clashing_axis(rule(other), 3) == axis
    assert rule(other).clashing_axis(rule(one), 3) == axis
