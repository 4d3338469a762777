from dataclasses import replace

import pytest
from msgspec.structs import replace as set_

from distdiag.checks.moe.expert_gradient_divisor import ExpertGradientDivisor
from distdiag.findings.finding import Grade, Severity
from distdiag.views.gradients import Combined, combined_on
from tests.checks.gradients import DENSE, EXPERTS, sample, view
from tests.checks.verdicts import findings


def judged(*samples):
    return findings(ExpertGradientDivisor, view(*samples))


def changed(one, change):
    """The same step, with what each rank tells changed so."""
    return replace(one, by_rank={rank: change(event) for rank, event in one.by_rank.items()})


def only(dense, one, experts=EXPERTS):
    names = {*dense, *experts}
    return changed(
        one, lambda e: set_(e, gradients=tuple(g for g in e.gradients if g.name in names))
    )


def tabled(one, names=EXPERTS):
    """The same step, where these parameters are tables."""

    def mark(event):
        return set_(
            event, gradients=tuple(set_(g, is_table=g.name in names) for g in event.gradients)
        )

    return changed(one, mark)


def test_experts_that_are_not_divided_are_reported():
    (finding,) = judged(sample(0, 2.0, 1.0), sample(1, 2.0, 1.0))
    assert finding.severity is Severity.WARNING
    assert tuple(finding.ranks) == (0, 1)
    assert "2 times as large" in finding.message
    assert "experts.0.weight" in finding.subjects
    assert "tokens of ranks 0-1" in finding.evidence[0].summary


def test_one_dense_parameter_is_enough_if_it_is_seen_often():
    samples = [only(DENSE[:1], sample(step, 2.0, 1.0)) for step in range(3)]
    (finding,) = judged(*samples)
    assert "2 times as large" in finding.message
    assert not judged(samples[0])


def test_experts_whose_gradients_were_not_all_read_are_reported_by_the_others():
    samples = [only(DENSE, sample(step, 2.0, 1.0), EXPERTS[1:]) for step in range(2)]
    (finding,) = judged(*samples)
    assert "of the experts of" in finding.message


def test_tables_of_which_an_expert_was_not_looked_at_are_no_harm():
    samples = [
        tabled(only(DENSE, sample(n, 2.0, 1.0), EXPERTS[1:]), (*DENSE, *EXPERTS)) for n in (0, 1)
    ]
    (finding,) = judged(*samples)
    assert "2 times as large" in finding.message


def test_experts_that_are_divided_twice_are_reported():
    (finding,) = judged(sample(0, 2.0, 4.0))
    assert "2 times smaller" in finding.message


def test_a_clip_that_scales_all_gradients_hides_nothing():
    (finding,) = judged(sample(0, 200.0, 100.0), sample(1, 2.0, 1.0))
    assert "2 times as large" in finding.message


@pytest.mark.parametrize(
    ("dense", "experts", "values"),
    [
        (2.0, 2.0, {}),
        (1.0, 1.0, {}),
        (2.0, 1.0, {"factor": 0.5}),
        (2.0, 1.0, {"scale": 0.5}),
        (2.0, 1.47, {}),
        (-2.0, 1.0, {}),
    ],
    ids=["divided", "sums", "by the exchange", "by a function", "clipped apart", "not known"],
)
def test_what_is_right_or_not_clear_is_silent(dense, experts, values):
    assert not judged(sample(0, dense, experts, **values), sample(1, dense, experts, **values))


def test_a_function_that_scales_something_else_makes_it_a_note():
    (finding,) = judged(sample(0, 2.0, 1.0, scale=0.1))
    assert finding.grade is Grade.NOTE


def test_looks_that_disagree_are_silent():
    assert not judged(sample(0, 2.0, 1.0), sample(1, 2.0, 2.0))


def test_gradients_of_different_experts_that_are_added_up_are_reported():
    (finding,) = judged(sample(0, 2.0, 2.0, of_rank=lambda _: (0, 1)))
    assert finding.severity is Severity.WARNING
    assert "different experts" in finding.message


def test_copies_of_experts_whose_gradients_are_added_up_are_not():
    assert not judged(sample(0, 2.0, 2.0, of_rank=lambda _: (0, 1), weight=0.5))


def test_what_passes_no_exchange_is_not_of_an_expert():
    nothing = dict.fromkeys((0, 1), ((), (), ()))
    assert not judged(replace(sample(0, 2.0, 1.0), exchanges=nothing))


def test_how_gradients_were_combined_is_reported_by_sums_alone():
    found = combined_on([sample(0, 2.0, 1.0)], 0, DENSE.__contains__)
    assert found == Combined((0, 1), pytest.approx(2.0))
    local = combined_on([sample(0, 2.0, 1.0)], 1, lambda name: name not in DENSE)
    assert local == Combined((1,), pytest.approx(1.0))


def test_tables_of_embeddings_may_have_a_rate_of_their_own():
    (finding,) = judged(tabled(sample(0, 2.0, 1.0)), tabled(sample(1, 2.0, 1.0)))
    assert finding.grade is Grade.NOTE
    assert "the gradients of the tables of" in finding.message


def test_a_part_of_the_graph_that_is_not_known_whole_is_silent():
    def unbound(event):
        return set_(event, nodes=tuple(set_(p, is_bounded=False) for p in event.nodes))

    assert not judged(changed(sample(0, 2.0, 1.0), unbound))
