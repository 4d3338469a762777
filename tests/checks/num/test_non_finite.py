"""NUM001 to NUM004 over the reports of ranks, in the order in which slow ranks would send them."""

from __future__ import annotations

import pytest

from distdiag.checks.num.lone_non_finite_decision import LoneNonFiniteDecision
from distdiag.checks.num.masked_non_finite import MaskedNonFinite
from distdiag.checks.num.near_overflow import NearOverflow
from distdiag.checks.num.non_finite_origin import NonFiniteOrigin
from distdiag.engine.numerics import NumericsAligner
from distdiag.events import numerics
from distdiag.events.lifecycle import Finished, Raised, StepEnd
from distdiag.events.numerics import NonFinite, NonFinitePlace
from tests.checks.streams import event_of
from tests.engine.aligned import aligned, broken, engine_of

CHECKS = (NonFiniteOrigin, MaskedNonFinite, LoneNonFiniteDecision, NearOverflow)


def place(stage="forward", module="layers.1", value="nan", number=9, **more):
    what = more.pop("what", "its output" if stage == "forward" else "its weight")
    fields = {"kind": "Block", "model": "GPT", "what": what}
    return NonFinitePlace(stage=stage, module=module, value=value, number=number, **fields, **more)


def report(rank, step, *places, outcome="stepped", window=None, **more):
    window = step if window is None else window
    places = places or (place(),)
    fields = {"window": window, "outcome": outcome, "places": places, "num_places": len(places)}
    return event_of(NonFinite, rank, step=step, **fields, **more)


def step_end(rank, step):
    return event_of(StepEnd, rank, step=step, duration_s=0.1, num_backwards=1)


def raised(rank, step, time_ns=5):
    fields = {"type": "ValueError", "message": "loss is NaN", "frames": (), "traceback": ""}
    return event_of(Raised, rank, step=step, time_ns=time_ns, **fields)


def finished(rank):
    return event_of(Finished, rank, exit_status=0)


def judged(*events, world=(0, 1)):
    found = engine_of(*events, world=world, checks=[check() for check in CHECKS]).findings
    return [each for each in found]


def test_the_rank_that_made_it_is_named_and_not_those_that_got_it_by_a_reduction():
    spread = place("gradient", "embed", number=80)
    (found,) = judged(
        report(0, 3, spread),
        step_end(0, 3),
        report(0, 4),
        report(1, 3),
        step_end(1, 3),
        report(1, 4),
    )

    assert (found.code, found.step, list(found.ranks)) == ("NUM001", 3, [1])
    assert found.message == (
        "the first NaN of step 3 is the output of layers.1 (Block) on rank 1, in the forward pass"
    )
    assert "its inputs were finite" in found.fix
    assert "later: the gradient of" not in found.message
    assert [list(each.ranks) for each in found.evidence] == [[0], [1]]


def test_it_is_said_where_modules_were_not_read():
    unread = [report(rank, 3, place("loss", ""), are_modules_read=False) for rank in (0, 1)]
    (found,) = judged(*unread, step_end(0, 3), step_end(1, 3))
    assert "modules were not read in this step" in found.message


def test_all_ranks_are_named_that_met_it_at_the_same_place():
    (found,) = judged(report(0, 3), report(1, 3))

    assert list(found.ranks) == [0, 1]


def test_what_a_rank_holds_comes_before_what_another_one_gets_of_it():
    held = place("parameter", "layers.2", number=40)
    (found,) = judged(report(0, 0), report(1, 0, held))

    assert list(found.ranks) == [1]
    assert "weight of layers.2 (Block) on rank 1, before the forward pass" in found.message


def test_a_batch_that_holds_it_already_is_to_be_looked_at_and_not_the_model():
    given = place("input", "", number=1)
    (found,) = judged(report(0, 3), report(1, 3, given))

    assert list(found.ranks) == [1]
    assert found.fix.startswith("Check where the named rank reads")


def test_the_earlier_module_is_named_where_a_forward_pass_sends_it_to_other_ranks():
    (found,) = judged(report(0, 3, place(number=7)), report(1, 3, place(module="layers.0")))

    assert list(found.ranks) == [0]


def test_a_step_that_was_left_out_is_a_note_and_a_later_one_that_was_used_an_error():
    left = report(1, 3, outcome="dropped")
    (note,) = judged(left, step_end(0, 3), step_end(1, 3), finished(0), finished(1))
    assert (note.code, note.grade.value) == ("NUM001", "note")

    found = judged(left, report(1, 9, place(module="head")), finished(0), finished(1))
    assert {(each.step, each.severity.value) for each in found} == {(3, "info"), (9, "error")}


def test_overflows_of_scaled_gradients_that_are_skipped_are_nothing():
    scaled = place("backward", value="inf", what="the gradient of its input")
    events = [report(rank, 0, scaled, outcome="skipped") for rank in (0, 1)]

    assert judged(*events, finished(0), finished(1)) == []


def test_an_early_report_alone_is_no_finding_of_a_run_that_goes_on():
    assert judged(report(1, 3, outcome="")) == []


def test_minus_infinity_counts_only_where_the_loss_has_nothing_else():
    log = place(module="log", value="-inf", number=2)
    loss = place("loss", "", what="the loss", value="inf", number=5)
    (found,) = judged(report(0, 1, loss, infinite=(log,)))
    assert "minus infinity of step 1 is the output of log" in found.message

    (found,) = judged(report(0, 1, place(number=3), loss, infinite=(log,)))
    assert "NaN of step 1 is the output of layers.1" in found.message


@pytest.mark.parametrize(("hidden_by", "severity"), [("nan_to_num", "warning"), ("", "info")])
def test_a_nan_that_an_operation_hides_is_a_warning_and_one_that_nothing_reads_a_note(
    hidden_by, severity
):
    (found,) = judged(
        report(0, 3, outcome="masked"),
        report(0, 4, place(hidden_by=hidden_by), outcome="masked"),
        finished(0),
        finished(1),
    )

    assert (found.code, found.severity.value) == ("NUM002", severity)
    assert hidden_by in found.message


def test_infinity_that_is_masked_is_normal():
    events = report(0, 3, place(value="inf"), outcome="masked"), finished(0), finished(1)

    assert judged(*events) == []


def test_a_rank_that_raises_over_its_own_number_is_named():
    events = report(1, 3, outcome="ended"), raised(1, 3), raised(0, 3, time_ns=9)
    by_code = {each.code: each for each in judged(*events)}

    assert list(by_code) == ["NUM001", "NUM003"]
    assert list(by_code["NUM003"].ranks) == [1]
    assert (
        by_code["NUM003"].message
    ) == "rank 1 raised at step 3 over a NaN that rank 0 does not have"


def test_all_ranks_that_raise_over_it_have_decided_alike():
    events = [e for r in (0, 1) for e in (report(r, 3, outcome="ended"), raised(r, 3))]

    assert [each.code for each in judged(*events)] == ["NUM001"]


def test_a_rank_that_raised_after_another_one_had_failed_did_not_decide():
    events = report(1, 3, outcome="ended"), raised(0, 3, time_ns=1), raised(1, 3)

    assert "NUM003" not in [each.code for each in judged(*events)]


def test_a_rank_that_skips_alone_is_named_if_the_job_does_not_end():
    dropped = report(1, 3, outcome="dropped")
    steps = [step_end(0, step) for step in range(4)] + [step_end(1, step) for step in range(3)]
    by_code = {each.code: each for each in judged(dropped, *steps)}

    assert list(by_code["NUM003"].ranks) == [1]
    assert "went on without the step" in by_code["NUM003"].message


def test_ranks_that_skip_together_end_together():
    dropped = report(1, 3, outcome="dropped")
    steps = [step_end(rank, step) for rank in (0, 1) for step in range(5)]

    found = judged(dropped, *steps, finished(0), finished(1))
    assert [each.code for each in found] == ["NUM001"]


def test_a_module_near_the_limit_of_its_type_is_one_note_for_all_ranks():
    fields = {"model": "GPT", "module": "up", "module_class": "Linear", "dtype": "float16"}
    fields |= {"largest": 40_000.0, "limit": 65504.0, "earlier": 900.0, "earlier_step": 0}
    events = [event_of(numerics.NearOverflow, rank, step=8, **fields) for rank in (0, 1)]
    (found,) = judged(*events)

    assert found.grade.value == "note"
    assert found.message == (
        "the output of up (Linear) reaches 4e+04 at step 8, from 900 at step 0; "
        "float16 ends at 65504"
    )


def test_a_rank_whose_probe_broke_was_not_observed():
    gaps = aligned(NumericsAligner, broken(1, "numerics"))

    assert "numbers of rank 1" in gaps.why(NumericsAligner.builds[0])
