import pytest

from distdiag.checks.shd.unmatched_plan_pattern import UnmatchedPlanPattern
from distdiag.events.models import PlanSource
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import plan
from tests.checks.plans import PAIR, pattern, program, rules
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings

NAMES = ("base.model.layers.0.attn.wq.weight", "base.model.layers.1.attn.wq.weight")
TENSORS = [plan(name) for name in NAMES]


def unmatched(view):
    return findings(UnmatchedPlanPattern, view)


@pytest.mark.parametrize(
    "text",
    ["model.layers.*.attn.wq.weight", "base.model.layers.*.atn.wq.weight", "*.layers.*.attn.wq"],
    ids=["prefix", "typo", "module"],
)
def test_a_rule_without_a_match_is_named_with_what_is_there_instead(text):
    (finding,) = unmatched(rules({text: "Shard(0) over tp"}, *TENSORS))
    assert (finding.severity, finding.ranks, finding.subjects) == (Severity.WARNING, PAIR, (text,))
    assert '; "base.model.layers.*.attn.wq.weight" is there' in finding.message


def test_a_rule_that_is_like_nothing_has_no_hint():
    (finding,) = unmatched(rules({"zzz": "Shard(0) over tp"}, *TENSORS))
    assert finding.message.endswith("matches none of 2 tensors of Net")


def test_rules_that_match_are_silent():
    table = {"base.*.wq.weight": "Shard(0) over tp", "*.layers.1.*": "Shard(0) over tp"}
    assert not unmatched(rules(table, *TENSORS))


def test_only_the_patterns_of_a_program_that_match_nowhere_are_named():
    patterns = [pattern("up"), pattern("dwn", 0, closest="down"), pattern("gate", 0)]
    (finding,) = unmatched(program(*patterns))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.PROVEN)
    assert (finding.subjects, finding.location.line) == (("dwn", "gate"), 7)
    assert '"dwn" and 1 more of the parallelize_module plan for Net match nothing' in (
        finding.message
    )
    assert 'no match; "down" is there' in finding.evidence[0].summary
    assert not unmatched(program(pattern("up", 3)))


def test_a_list_of_which_ddp_ignores_nothing_is_named_and_one_that_covers_more_is_a_note():
    names = [pattern("module.a", 0, closest="a"), pattern("module.b", 0)]
    (finding,) = unmatched(program(*names, source=PlanSource.DDP_IGNORED))
    assert finding.severity is Severity.WARNING
    assert "of the DDP ignore list for Net match nothing" in finding.message
    (finding,) = unmatched(program(*names, pattern("a"), source=PlanSource.DDP_IGNORED))
    assert finding.severity is Severity.INFO


def test_the_plans_of_libraries_are_general_and_get_a_note():
    foreign = plain_site(7)  # the innermost frame is a library's
    for view in (
        program(pattern("gate", 0), site=foreign),
        program(pattern("gate", 0), source=PlanSource.TRANSFORMERS),
    ):
        (finding,) = unmatched(view)
        assert finding.severity is Severity.INFO
    (finding,) = unmatched(program(pattern("gate", 0), source=PlanSource.VEOMNI, site=foreign))
    assert finding.severity is Severity.WARNING
