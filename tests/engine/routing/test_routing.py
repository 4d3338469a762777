from distdiag.checks.moe.divergent_routing import DivergentRouting
from distdiag.checks.moe.recounted_tokens import RecountedTokens
from distdiag.checks.moe.rerouted_recompute import ReroutedRecompute
from distdiag.checks.moe.unused_aux_loss import UnusedAuxLoss
from distdiag.engine.routing.routing import RoutingAligner
from distdiag.events.lifecycle import Finished, StepEnd
from distdiag.findings.finding import Grade
from distdiag.views.routing import AuxLossRouting, RepeatedRouting, RoutingView
from tests.checks.routing import aux_loss, counter, routing
from tests.checks.streams import event_of
from tests.engine.aligned import aligned, broken

CHECKS = ReroutedRecompute, DivergentRouting, RecountedTokens, UnusedAuxLoss


def routed(*events, ends=True):
    return aligned(RoutingAligner, *events, checks=[check() for check in CHECKS], ends=ends)


def found(*events, ends=True):
    return routed(*events, ends=ends).codes


def both_passes(rank=0, step=0, *, again="same", **values):
    return [
        routing(rank, step, chosen="same", **values),
        routing(rank, step, chosen=again, is_recompute=True, **values),
    ]


def end_of(rank, step):
    return event_of(StepEnd, rank, step=step, duration_s=1.0)


def test_a_repeated_pass_is_compared_with_the_first_ones_of_its_step():
    assert found(*both_passes()) == []
    assert found(*both_passes(again="other")) == ["MOE001"]


def test_repeated_passes_may_come_in_any_order():
    first = [routing(chosen=str(i), call=i) for i in range(3)]
    again = [routing(chosen=str(i), call=2 - i, is_recompute=True) for i in range(3)]
    assert found(*first, *again) == []


def test_where_first_passes_were_not_seen_nothing_is_said():
    lone = routing(chosen="other", is_recompute=True)
    assert found(lone) == []
    assert found(*both_passes(), lone) == []
    assert found(routing(chosen=""), lone) == []


def test_ranks_are_compared_where_they_were_given_the_same():
    same = {"given": "same", "scores": "s"}
    assert found(routing(0), routing(1)) == []
    assert found(*(routing(r, chosen="x", **same) for r in (0, 1))) == []
    assert found(*(routing(r, **same) for r in (0, 1))) == ["MOE002"]
    assert found(*(routing(r, is_random=True, **same) for r in (0, 1))) == []
    assert found(*(routing(r, num_tokens=0, **same) for r in (0, 1))) == []


def test_a_step_is_judged_when_all_ranks_have_gone_on():
    wrong = both_passes(again="other")
    ends = [end_of(0, 2), end_of(1, 1)]
    assert found(*wrong, *ends, ends=False) == []
    assert found(*wrong, *ends, end_of(1, 2), ends=False) == ["MOE001"]


def test_what_was_not_seen_is_said():
    assert routed().why(RoutingView) == "no choice of experts was seen"
    gaps = routed(routing()).gaps
    assert gaps[AuxLossRouting].reason == "no auxiliary (load-balancing) loss was seen"
    assert gaps.keys() == {RepeatedRouting, AuxLossRouting}
    assert not routed(*both_passes(), aux_loss()).gaps
    assert "rank 1" in routed(routing(), broken(1, "routing")).why(RoutingView)


def test_a_counter_that_is_only_set_again_is_no_fault():
    first = [counter(after=str(i), call=i) for i in range(2)]
    again = [counter(after=str(1 - i), call=i, is_recompute=True) for i in range(2)]
    assert found(*first, *again) == []


def test_a_counter_that_goes_on_in_a_repeated_pass_is_one():
    assert found(counter(), counter(after="more", is_recompute=True)) == ["MOE008"]
    assert found(counter(after="more", is_recompute=True)) == []


def test_a_aux_loss_that_was_used_once_stays_used():
    used = aux_loss(step=0, num_used=1, coefficient="aux_loss_coef = 0.01")
    later = [aux_loss(step=100 * n, coefficient="aux_loss_coef = 0.01") for n in range(1, 40)]
    assert found(used, *later) == []
    assert found(*later) == ["MOE010"]


def over(rank, exit_status=0):
    return event_of(Finished, rank, exit_status=exit_status)


def grade_at_the_end(*ends):
    coefficient = {"coefficient": "aux_loss_coef = 0.01"}
    samples = [aux_loss(rank, step, **coefficient) for step in (0, 5) for rank in (0, 1)]
    (finding,) = routed(*samples, end_of(0, 5), end_of(1, 5), *ends).findings
    return finding.grade


def test_a_aux_loss_is_forgotten_when_all_ranks_are_through():
    assert grade_at_the_end(over(0), over(1)) is Grade.LIKELY
    assert grade_at_the_end(over(0)) is Grade.NOTE
    assert grade_at_the_end(over(0), over(1, exit_status=1)) is Grade.NOTE
