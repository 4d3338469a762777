"""What a run has nothing of, and what was not observed, is not said to have been checked."""

from __future__ import annotations

import pytest

from distdiag.checks import load_checks
from distdiag.checks.moe.aux_loss_scale import AuxLossScale
from distdiag.checks.moe.duplicated_experts import DuplicatedExperts
from distdiag.checks.rep.replica_mismatch import ReplicaMismatch
from distdiag.engine.aligner import LeftOut, NothingThere, NotObserved, subjects
from distdiag.engine.coverage import Coverage, Looked
from distdiag.engine.creations import Creations
from distdiag.engine.models.aligner import ModelAligner
from distdiag.engine.runner import CheckRunner
from distdiag.events.base import Event
from distdiag.events.lifecycle import Finished, Unobserved
from distdiag.events.models import Moment
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import SeenMask
from tests.checks.dia.test_silent_rank import begun, started
from tests.checks.feeds import epoch_fed, model_fed, schedule
from tests.checks.losses import aux, over, part, reported
from tests.checks.models import plan, plan_event, state_event
from tests.checks.routing import routing
from tests.checks.sequences import passed
from tests.engine.aligned import broken, engine_of, job_of

PAIR = (0, 1)
LIGHT = "the light profile leaves the steps out"


def gaps(*events: Event, **options: bool) -> dict[str, str]:
    """What a run in which this was seen says of the checks that looked at nothing."""
    return engine_of(*events, **options).not_checked


def of_both(tell, *values, **more):
    return [tell(rank, *values, **more) for rank in PAIR]


def model(*tensors):
    """Both ranks keep these and another one, and tell of the start and of a step."""
    plans = of_both(plan_event, (plan("gate.weight", replicas=PAIR), *tensors))
    moments = (Moment.START, Moment.GRADIENT, Moment.STEP)
    values = [0.1 * n for n in range(len(tensors) + 1)]
    states = [of_both(state_event, values, moment=each) for each in moments]
    return [*plans, *(event for each in states for event in each)]


DENSE = [*model(), *of_both(reported, [part(40, 1 / 40, over(40))])]
EXPERT = model(plan("experts.0.up.weight"))
BIAS = model(plan("bias", is_routing_bias=True))
BALANCED = of_both(reported, [part(40, 1 / 40, over(40), aux=(aux(),))])
REPEATED = of_both(routing, is_recompute=True)
PLACED = of_both(passed, 0, positions=("a",))
MASKED = of_both(passed, 0, mask=SeenMask(num_queries=8, num_keys=16, aligned="first"))


# What `Coverage` says of one check


class Failing(ReplicaMismatch):
    """Fails at whatever it is shown."""

    def check(self, view):
        raise KeyError(view)


def of(check, *events, checks=None, **options):
    """What is known of a check after these events of models."""
    runner = CheckRunner(checks or [check], Creations())
    job = job_of(runner, **options)
    aligner = ModelAligner(job)
    coverage = Coverage(runner, [aligner], job)
    for event in events:
        coverage.feed(event)
        if isinstance(event, ModelAligner.needs):
            for view in aligner.feed(event):
                runner.show(view)
    return coverage.of(check)


def test_an_aligner_is_asked_once_for_all_checks(monkeypatch):
    asked = []
    monkeypatch.setattr(ModelAligner, "gaps", lambda self: asked.append(self) or {})
    engine = engine_of()
    assert engine.not_checked
    assert len(asked) == 1
    assert engine.idle
    assert len(asked) == 2


def test_a_check_whose_view_was_built_has_looked():
    assert of(ReplicaMismatch(), *DENSE) == Looked()


def test_what_an_empty_run_holds_nothing_of_is_known_by_its_subject():
    found = gaps()
    assert len(found) > 60
    assert {reason for reason in found.values() if reason not in subjects()} == set()
    assert subjects()[found["MOE001"]] == subjects()[found["MOE003"]] == "experts"


def test_a_check_has_looked_if_one_of_its_views_was_built():
    class Both(ReplicaMismatch):
        views = (*DuplicatedExperts.views, *ReplicaMismatch.views)

    assert of(Both(), *DENSE) == Looked()


def test_a_check_whose_view_was_never_built_had_nothing_to_judge():
    reason = "no parameter was recognised as one of an expert"
    assert of(DuplicatedExperts(), *DENSE) == NothingThere("experts", reason)


def test_a_check_of_which_one_view_was_not_observed_may_have_missed_some():
    class Both(ReplicaMismatch):
        views = (*ReplicaMismatch.views, *AuxLossScale.views)

    reason = "the losses of rank 1 are not observed wholly"
    assert of(Both(), *DENSE, broken(1, "losses")) == NotObserved(reason)


def test_a_profile_leaves_out_checks_of_which_it_leaves_out_all_views():
    class Both(DuplicatedExperts):
        views = (*AuxLossScale.views, *DuplicatedExperts.views)

    assert of(AuxLossScale(), *DENSE, only_start=True) == LeftOut(LIGHT)
    assert isinstance(of(Both(), *DENSE, only_start=True), NothingThere)


def test_a_check_that_crashed_did_not_look():
    differing = [*of_both(plan_event, [plan(replicas=PAIR)])]
    differing += [state_event(rank, [0.1 + rank]) for rank in PAIR]
    found = of(Failing(), *differing)
    assert isinstance(found, NotObserved)
    assert found.reason.startswith("the check crashed: KeyError: ")


def test_where_one_rank_of_several_is_observed_nothing_was_compared():
    found = of(ReplicaMismatch(), begun((0, 1, 2)), *DENSE, world=[0])
    reason = "only rank 0 was observed and not ranks 1-2, so no ranks were compared"
    assert found == NotObserved(reason)


# What a whole run says


def test_a_dense_run_was_not_checked_for_what_experts_do():
    found = gaps(*DENSE)
    codes = {code for code in load_checks() if code.startswith(("MOE", "SEQ"))}
    assert codes - {"SEQ007"} <= found.keys()  # that one judges losses as well
    assert found["MOE009"] == "no auxiliary (load-balancing) loss was seen in a loss"
    assert not {"PAR001", "PAR013"} & found.keys()


@pytest.mark.parametrize(
    ("code", "events"),
    [
        ("MOE001", REPEATED),
        ("MOE008", REPEATED),
        ("MOE005", EXPERT),
        ("MOE009", BALANCED),
        ("MOE013", BIAS),
        ("PAR004", of_both(schedule)),
        ("SEQ011", PLACED),
        ("SEQ013", MASKED),
    ],
)
def test_what_was_seen_counts_as_checked(code, events):
    assert code in gaps(*DENSE)
    assert code not in gaps(*DENSE, *events)


def test_samplers_count_as_checked_only_where_they_say_something():
    plain = {"num_ranks": 2, "epoch": None, "num_replicas": None, "replica": None}
    why = "no sampler was seen that says its part of the data or its epoch"
    found = gaps(*of_both(lambda rank: epoch_fed(rank, range(8), **plain)))
    assert {found.get(f"DAT00{number}") for number in (1, 3, 4)} == {why}
    assert "DAT007" not in found
    assert not {"DAT001", "DAT007"} & gaps(*of_both(lambda rank: epoch_fed(rank, range(8)))).keys()


def test_inputs_count_as_checked_by_whence_they_come():
    found = gaps(*(model_fed(rank, number) for number in range(2) for rank in PAIR))
    assert {"DAT006", "DAT008"} <= found.keys()
    assert "DAT002" not in found
    assert found["DAT006"] == "nothing was drawn for the samples of a training step"


@pytest.mark.parametrize(
    ("codes", "reason"),
    [
        (("BAR001", "BAR006"), "no access to a file was observed"),
        (("CKP003", "CKP004", "CKP007"), "nothing was loaded into a model or an optimizer"),
        (("CKP006",), "no state of a rank was given to a distributed checkpoint"),
        (("COL001", "COL003", "ENV001"), "no collective was called"),
        (("COL008",), "no creation of a process group was seen"),
        (("DAT001", "DAT007"), "no pass over a data set was seen"),
        (("DAT002", "DAT006", "DAT008"), "no model was seen to be fed"),
        (("DAT005",), "no rows of a last batch were gathered"),
        (("HNG017",), "no stacks of ranks were taken"),
        (("REP005", "SHD014"), "no model was seen"),
    ],
)
def test_a_run_of_which_nothing_was_seen_says_what_was_missing(codes, reason):
    found = gaps()
    assert {found[code] for code in codes} == {reason}


def test_a_check_of_the_job_as_a_whole_always_looks():
    assert not {"DIA001", "DIA002", "DIA003", "HNG001", "HNG002", "HNG004"} & gaps().keys()


@pytest.mark.parametrize(
    ("probe", "code"),
    [
        ("files", "BAR001"),
        ("gradient-sums", "MOE012"),
        ("losses", "PAR001"),
        ("models", "REP001"),
        ("routing", "MOE002"),
    ],
)
def test_whose_probe_was_off_is_reported(probe, code):
    why = gaps(*DENSE, *BALANCED, broken(1, probe))[code]
    assert "of rank 1" in why
    assert why.endswith("not observed wholly")


def test_what_a_probe_does_not_see_is_reported_with_the_ranks():
    unseen = {"seq": 1, "time_ns": 0, "what": "tensors", "probe": "models", "reason": "too many"}
    found = gaps(*[Unobserved(rank=rank, **unseen) for rank in PAIR])
    assert found["tensors"] == "probe models of ranks 0-1 does not observe it: too many"


def test_what_the_light_profile_does_not_record_is_its_own_doing():
    found = gaps(*DENSE, only_start=True)
    steps = {"MOE009", "MOE010", "MOE012", "PAR001", "PAR013", "SEQ007", "SEQ011"}
    assert {found[code] for code in steps} == {LIGHT}
    assert found["MOE002"] == "no choice of experts was seen"


# Ranks that nobody reads

NEVER_ALONE = {"COL001", "COL003", "BAR001", "REP001", "SHD001", "DAT002", "PAR001", "CKP006"}
ALONE = {"DIA001", "DIA002", "DIA003", "COL010", "HNG001", "HNG002", "HNG004"}


def judged(*events, world=(0,)):
    return engine_of(*events, world=world)


def test_the_ranks_of_a_group_beyond_the_world_are_unobserved():
    engine = judged(started(), begun((0, 1, 2)), Finished(rank=0, seq=3, time_ns=9, exit_status=0))
    assert engine.unobserved == RankSet([1, 2])
    reason = "only rank 0 was observed and not ranks 1-2, so no ranks were compared"
    assert {code for code, why in engine.not_checked.items() if why == reason} >= NEVER_ALONE
    assert not ALONE & engine.not_checked.keys()


def test_a_job_of_which_two_ranks_are_observed_was_compared():
    engine = judged(started(2), begun((0, 1, 2)), world=(0, 1))
    assert engine.unobserved == RankSet([2])
    assert "COL001" not in engine.not_checked


def test_whoever_is_alone_misses_nobody():
    engine = judged(started(), begun((0,)))
    assert not engine.unobserved
    assert "COL001" not in engine.not_checked
