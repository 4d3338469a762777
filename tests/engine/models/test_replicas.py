"""Copies that drift apart are an alarm where nothing of their size passes between the ranks."""

from __future__ import annotations

import itertools

import pytest

from distdiag.checks import load_checks
from distdiag.engine.models.aligner import ModelWatch
from distdiag.engine.models.replicas import FEWEST_STEPS, PATIENCE, Apart
from distdiag.engine.runner import Judges
from distdiag.events.collectives import GroupCreated, Signature
from distdiag.events.lifecycle import Finished, ProbeDisabled, StepEnd
from distdiag.events.models import Basis, Moment
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import plan, plan_event, state_event
from tests.checks.streams import Job, plain_site

SEQS = itertools.count(1000)
PAIR = (0, 1)


def looks(values, *, ranks=PAIR, names=("a", "b", "c"), **fields):
    """What each rank's gradients and parameters are in its first two steps: a number for each."""
    fields.setdefault("basis", Basis.UNSYNCED)
    plans = [plan(name, replicas=tuple(ranks), **fields) for name in names]
    for rank in ranks:
        yield plan_event(rank, plans)
    for moment, step in (
        (Moment.START, 0),
        (Moment.GRADIENT, 0),
        (Moment.STEP, 0),
        (Moment.STEP, 1),
    ):
        for rank in ranks:
            held = values(rank, moment, step)
            yield state_event(rank, [held] * len(names), moment=moment, step=step)


def drifting(rank, moment, step):
    """Each rank's own gradients move what was the same."""
    return 0.1 + (rank if moment is Moment.GRADIENT or step else 0)


def only_gradients(rank, moment, step):
    """Each rank's gradients are its own, and the updates are not."""
    return 0.1 + (rank if moment is Moment.GRADIENT else 0)


def steps(number, ranks=PAIR):
    for step in range(number):
        for rank in ranks:
            yield StepEnd(rank=rank, seq=next(SEQS), time_ns=0, step=step, duration_s=0.1)


def ends(ranks=PAIR, status=0):
    return [Finished(rank=r, seq=next(SEQS), time_ns=0, exit_status=status) for r in ranks]


def call(number, step=2, *, ranks=PAIR, world=2, op="all_reduce", **sign):
    """One rank's call that carries so many float32."""
    job = Job(world)
    made = Signature(op, input_sizes=((number,),), dtypes=("float32",), **sign)
    group = job.group(ranks, f"group of {ranks}")
    return job.call(ranks[0], plain_site(9), group=group, sign=made, step=step)


def found(*events, world=2, is_over=True):
    """The findings of unreduced gradients."""
    judges = Judges(check() for check in load_checks().values())
    apart = Apart(judges)
    watch = ModelWatch(RankSet(range(world)), judges, apart=apart)
    for event in events:
        for each in (watch, apart):
            if isinstance(event, each.kinds):
                each.feed(event)
    if is_over:
        watch.finish()
        apart.finish()
    assert not judges.disabled
    return [finding for finding in judges.conclusions.all() if finding.code == "SHD004"]


def test_ranks_that_never_exchange_anything_are_an_alarm_at_the_end():
    (finding,) = found(*looks(drifting), *steps(8), *ends())
    assert finding.severity is Severity.WARNING
    assert finding.grade is Grade.LIKELY
    assert finding.ranks == RankSet(PAIR)
    assert finding.subjects == ("a", "b", "c")
    assert "in 8 steps nothing as large was exchanged between them" in finding.message


def test_a_long_run_is_judged_while_it_trains():
    long = steps(PATIENCE[Basis.UNSYNCED])
    (finding,) = found(*looks(drifting), *long, is_over=False)
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    "rest",
    [
        [*steps(8), call(32), *ends()],
        [*steps(8), call(16), call(16, op="broadcast"), *ends()],
        [*steps(8), *(call(1, step) for step in range(1, 49)), *ends()],
        [*steps(8), call(32, op="send", peer=1), *ends()],
        [*steps(FEWEST_STEPS - 1), *ends()],
        [*steps(8), *ends(status=1)],
        [*steps(8), *ends([0])],
        [
            ProbeDisabled(rank=1, seq=1, time_ns=0, probe="collectives", reason="x"),
            *steps(8),
            *ends(),
        ],
    ],
    ids=[
        "an average",
        "one of parts",
        "a stream of small parts",
        "messages",
        "a short run",
        "a run that failed",
        "a run that was cut off",
        "calls that were not seen",
    ],
)
def test_it_stays_a_note_after(rest):
    (finding,) = found(*looks(drifting), *rest)
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(
    "small",
    [call(1), call(32, op="gather", root=0), call(32, ranks=(0,))],
    ids=["a metric", "what one rank gets", "what one rank keeps"],
)
def test_nobody_is_brought_together_by(small):
    (finding,) = found(*looks(drifting), small, *steps(8), *ends())
    assert finding.severity is Severity.WARNING


def test_an_average_counts_though_it_is_told_before_what_the_models_hold():
    (finding,) = found(call(64), *looks(drifting), *steps(8), *ends())
    assert finding.severity is Severity.INFO


def test_gradients_that_differ_and_lead_to_equal_updates_stay_a_note():
    (finding,) = found(*looks(only_gradients), *steps(8), *ends())
    assert finding.severity is Severity.INFO


def test_ranks_that_never_were_alike_stay_a_note():
    (finding,) = found(*looks(lambda rank, *_: 0.1 + rank), *steps(8), *ends())
    assert finding.severity is Severity.INFO


# Groups that were made beside one another

REDUCING, OWN = (0, 2), (1, 3)
FOUR = range(4)


def groups(*parts, desc="mesh_dp", world=4):
    """All ranks create these groups, one after the other."""
    for ordinal, ranks in enumerate(parts):
        for rank in range(world):
            yield GroupCreated(
                rank=rank,
                seq=next(SEQS),
                time_ns=0,
                api="new_group",
                ordinal=ordinal,
                scope=tuple(range(world)),
                ranks=ranks,
                desc=desc,
                generation=0,
                site=plain_site(5),
            )


def stages(values=drifting, **fields):
    """Ranks 0 and 2 keep a stage whose gradients they reduce; 1 and 3 keep another one."""
    fields = {"basis": Basis.WORLD, "keeper": "", **fields}
    yield from looks(lambda *_: 0.1, ranks=REDUCING, names=("first",), **fields)
    yield from looks(values, ranks=OWN, names=("second", "third"), **fields)


REDUCED = [call(128, 0, ranks=REDUCING, world=4)]


@pytest.mark.parametrize(
    "split",
    [[*groups(REDUCING, OWN)], [*groups((0, 2, 1, 3))]],
    ids=["group by group", "all at once"],
)
def test_a_stage_that_does_not_reduce_beside_one_that_does_is_an_alarm(split):
    (finding,) = found(*split, *REDUCED, *stages(), *steps(8, FOUR), *ends(FOUR), world=4)
    assert finding.severity is Severity.WARNING
    assert finding.ranks == RankSet(OWN)
    assert finding.subjects == ("second", "third")
    assert "reduce their gradients" in finding.evidence[-1].summary


@pytest.mark.parametrize(
    "events",
    [
        [*groups(REDUCING, OWN), *stages()],
        [*groups(REDUCING, (1,), (3,)), *REDUCED, *stages()],
        [*groups(REDUCING, desc="leaders"), *groups(OWN, desc="rest"), *REDUCED, *stages()],
        [*groups(REDUCING, OWN), *REDUCED, *stages(), call(64, ranks=OWN, world=4)],
        [*groups(REDUCING, OWN), *REDUCED, *stages(requires_grad=False)],
        [*groups(REDUCING, OWN), *REDUCED, *stages(lambda *_: 0.3)],
        [*groups(REDUCING, OWN), *REDUCED, *stages(lambda rank, *_: 0.1 + rank)],
        [*groups(REDUCING, OWN), *REDUCED, *stages(only_gradients)],
    ],
    ids=[
        "nobody reduces",
        "the others are alone",
        "groups for other ends",
        "averages of their own",
        "a frozen stage",
        "reduced in another way",
        "experts of each rank",
        "equal updates",
    ],
)
def test_stages_are_silent_where(events):
    assert not found(*events, *steps(8, FOUR), *ends(FOUR), world=4)
