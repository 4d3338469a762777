"""Plans over ranks and time: what is judged when, and what is taken back."""

from distdiag.checks import load_checks
from distdiag.config.placement_rules import rules_of
from distdiag.engine.models.aligner import ModelWatch
from distdiag.engine.runner import Judges
from distdiag.events.base import CallSite, Frame
from distdiag.events.lifecycle import ProbeDisabled, RankStarted
from distdiag.events.models import NamedFault, PatternMatches, PlanFault, PlanPatterns, PlanSource
from distdiag.events.ranks import RankSet
from tests.checks.models import mesh, optimizer_state, plan, plan_event

PAIR = (0, 1)
CODES = ("SHD014", "SHD015", "SHD016", "SHD017")


class Job:
    """A job of two ranks."""

    def __init__(self, table=None):
        self.judges = Judges(load_checks()[code]() for code in CODES)
        self.watch = ModelWatch(RankSet(PAIR), self.judges, rules_of(table or {}))

    def feed(self, *events):
        for event in events:
            self.watch.feed(event)
        return self.found()

    def end(self):
        self.watch.finish()
        return self.found()

    def found(self):
        assert not self.judges.disabled
        return [(f.code, list(f.subjects)) for f in self.judges.conclusions.all()]


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
    return PlanPatterns(
        rank=rank, seq=0, time_ns=0, source=source, model="Net", patterns=patterns, site=site
    )


def started(rank, world_size):
    return RankStarted(
        rank=rank,
        seq=0,
        time_ns=0,
        local_rank=rank,
        world_size=world_size,
        hostname="node",
        pid=1,
        python="3",
        command=(),
        unix_ns=0,
    )


def test_a_table_is_judged_when_all_ranks_train():
    job = Job({"gone": "Shard(0) over ep"})
    one, other = step()
    assert not job.feed(*[plan_event(rank, held("w")) for rank in PAIR], one)
    assert job.feed(other) == [("SHD014", ["gone"])]
    assert job.end() == [("SHD014", ["gone"])]


def test_a_table_is_judged_at_the_end_of_a_job_that_never_trains():
    job = Job({"w": "Shard(0) over dp_replicate"})
    assert not job.feed(*[plan_event(rank, held("w")) for rank in PAIR])
    assert job.end() == [("SHD015", ["w"])]


def test_a_model_that_comes_later_takes_back_that_nothing_matches():
    job = Job({"late.*": "Replicate over *"})
    assert job.feed(*[plan_event(rank, held("w")) for rank in PAIR], *step())
    job.feed(plan_event(1, held("late.w"), name="Late"))
    assert job.end() == []


def test_a_rule_that_only_one_stage_has_is_no_defect():
    job = Job({"first": "Replicate over *", "last": "Replicate over *"})
    job.feed(plan_event(0, held("first")), plan_event(1, held("last")))
    assert job.end() == []


def test_without_models_a_table_is_not_judged():
    assert Job({"w": "Replicate over *"}).end() == []
    blind = Job({"w": "Replicate over *"})
    off = ProbeDisabled(rank=1, seq=0, time_ns=0, probe="models", reason="it broke")
    blind.feed(plan_event(0, held("other")), off)
    assert blind.end() == []


def test_with_ranks_that_nobody_sees_no_plan_is_judged():
    job = Job({"gone": "Replicate over *"})
    job.feed(started(0, world_size=4), plan_event(0, held("w")), applied(0, gone=0))
    assert job.end() == []
    job = Job({"gone": "Replicate over *"})
    job.feed(started(0, world_size=2), plan_event(0, held("w")), applied(0, gone=0))
    assert len(job.end()) == 2


def test_a_pattern_that_another_rank_or_another_part_matches_is_no_defect():
    job = Job()
    job.feed(applied(0, first=1, last=0), applied(1, first=0, last=1))
    job.feed(applied(0, line=9, moe=0), applied(0, line=9, moe=1))
    assert job.end() == []


def test_a_pattern_that_matches_nowhere_is_told_for_each_line():
    job = Job()
    job.feed(*[applied(rank, line=line, gone=0, up=2) for rank in PAIR for line in (3, 9)])
    assert job.end() == [("SHD014", ["gone"])] * 2


def test_faults_of_several_ranks_are_one_finding():
    cut = NamedFault(PlanFault.UNEVEN, "wk", "3 heads cannot be split")
    job = Job()
    job.feed(*[applied(rank, up=1, faults=[cut]) for rank in PAIR], *step())
    assert job.end() == [("SHD017", ["wk"])]
    (finding,) = job.judges.conclusions.all()
    assert finding.ranks == RankSet(PAIR)


def test_what_a_framework_splits_by_itself_fits_the_table():
    job = Job({"w": "Shard(0) over ep"})
    job.feed(*[plan_event(rank, held("w")) for rank in PAIR])
    job.feed(*[applied(rank, source=PlanSource.VEOMNI, w=1) for rank in PAIR])
    assert job.end() == []
