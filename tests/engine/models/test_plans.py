"""Plans over ranks and time: what is judged when, and what is taken back."""

from distdiag.checks import load_checks
from distdiag.config.placement_rules import rules_of
from distdiag.engine.models.aligner import ModelAligner
from distdiag.events.base import CallSite, Frame
from distdiag.events.models import NamedFault, PatternMatches, PlanFault, PlanPatterns, PlanSource
from distdiag.events.ranks import RankSet
from tests.checks.dia.test_silent_rank import started
from tests.checks.models import mesh, optimizer_state, plan, plan_event
from tests.checks.streams import event_of
from tests.engine.aligned import aligned, broken

PAIR = (0, 1)
CODES = ("SHD014", "SHD015", "SHD016", "SHD017")


def judged(*events, table=None, ends=True):
    """What is found with this table, after these events or at the end."""
    checks = [load_checks()[code]() for code in CODES]
    rules = rules_of(table or {})
    return aligned(ModelAligner, *events, checks=checks, rules=rules, ends=ends).findings


def found(*events, **options):
    return [(f.code, list(f.subjects)) for f in judged(*events, **options)]


def held(*names, placement="R"):
    return [plan(name, placements=(placement,), mesh=mesh(2)) for name in names]


def step():
    return [optimizer_state(rank) for rank in PAIR]


def applied(rank, *, line=3, source=PlanSource.PARALLELIZE_MODULE, faults=(), **matches):
    """A rank applies a plan at a line; the patterns match so often."""
    site = CallSite((Frame("train.py", line, "main"),))
    patterns = tuple(
        PatternMatches(text, "Shard(0) over ep", number, faults=tuple(faults))
        for text, number in matches.items()
    )
    fields = {"source": source, "model": "Net", "patterns": patterns, "site": site}
    return event_of(PlanPatterns, rank, **fields)


def models(*names):
    return [plan_event(rank, held(*names)) for rank in PAIR]


def test_a_table_is_judged_when_all_ranks_train():
    gone, (one, other) = {"gone": "Shard(0) over ep"}, step()
    assert not found(*models("w"), one, table=gone, ends=False)
    assert found(*models("w"), one, other, table=gone, ends=False) == [("SHD014", ["gone"])]
    assert found(*models("w"), one, other, table=gone) == [("SHD014", ["gone"])]


def test_a_table_is_judged_at_the_end_of_a_job_that_never_trains():
    table = {"w": "Shard(0) over dp_replicate"}
    assert not found(*models("w"), table=table, ends=False)
    assert found(*models("w"), table=table) == [("SHD015", ["w"])]


def test_a_model_that_comes_later_takes_back_that_nothing_matches():
    table, early = {"late.*": "Replicate over *"}, [*models("w"), *step()]
    assert found(*early, table=table, ends=False)
    assert not found(*early, plan_event(1, held("late.w"), name="Late"), table=table)


def test_a_rule_that_only_one_stage_has_is_no_defect():
    table = {"first": "Replicate over *", "last": "Replicate over *"}
    assert not found(plan_event(0, held("first")), plan_event(1, held("last")), table=table)


def test_without_models_a_table_is_not_judged():
    table = {"w": "Replicate over *"}
    assert not found(table=table)
    assert not found(plan_event(0, held("other")), broken(1, "models"), table=table)


def test_with_ranks_that_nobody_sees_no_plan_is_judged():
    table, reported = {"gone": "Replicate over *"}, [plan_event(0, held("w")), applied(0, gone=0)]
    assert not found(started(4), *reported, table=table)
    assert len(found(started(2), *reported, table=table)) == 2


def test_a_pattern_that_another_rank_or_another_part_matches_is_no_defect():
    ranks = applied(0, first=1, last=0), applied(1, first=0, last=1)
    assert not found(*ranks, applied(0, line=9, moe=0), applied(0, line=9, moe=1))


def test_a_pattern_that_matches_nowhere_is_reported_for_each_line():
    reported = [applied(rank, line=line, gone=0, up=2) for rank in PAIR for line in (3, 9)]
    assert found(*reported) == [("SHD014", ["gone"])] * 2


def test_faults_of_several_ranks_are_one_finding():
    cut = NamedFault(PlanFault.UNEVEN, "wk", "3 heads cannot be split")
    (finding,) = judged(*[applied(rank, up=1, faults=[cut]) for rank in PAIR], *step())
    assert (finding.code, finding.subjects, finding.ranks) == ("SHD017", ("wk",), RankSet(PAIR))


def test_what_a_framework_splits_by_itself_fits_the_table():
    split = [applied(rank, source=PlanSource.VEOMNI, w=1) for rank in PAIR]
    assert not found(*models("w"), *split, table={"w": "Shard(0) over ep"})
