"""Gradients that are combined wrongly are told, and those that may be intended are not."""

from dataclasses import replace

import pytest

from distdiag.checks.shd.misscaled_gradient import MisscaledGradient
from distdiag.checks.shd.partly_reduced_gradient import PartlyReducedGradient
from distdiag.checks.shd.stale_gradient import StaleGradient
from distdiag.checks.shd.unreduced_gradient import UnreducedGradient
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.contributions import Mix, view
from tests.checks.losses import losses, over, part
from tests.checks.losses import mean as mean_loss
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings

NAMES = tuple(f"layers.{n}.{kind}" for n in range(4) for kind in ("weight", "bias"))
ALL = (MisscaledGradient, PartlyReducedGradient, StaleGradient, UnreducedGradient)


def mean(num_ranks=2, num_passes=1, factor=1.0):
    size = factor / num_ranks
    return {(r, n): size for r in range(num_ranks) for n in range(num_passes)}


def own(rank, num_passes=1):
    return {(rank, number): 1.0 for number in range(num_passes)}


def all_alike(coefficients_of, **values):
    """A program that treats all parameters alike."""
    return view(lambda rank, _: dict.fromkeys(NAMES, Mix(coefficients_of(rank))), **values)


def judged(shown):
    return [finding for check in ALL for finding in findings(check, shown)]


# Passes


def off_by_one(rank):
    """The first pass is averaged, those after it are not."""
    return {**own(rank, 4), **mean()}


def test_passes_after_the_one_that_was_reduced_are_reported():
    (finding,) = judged(all_alike(off_by_one, num_passes=4))
    assert (finding.code, finding.severity) == ("SHD021", Severity.ERROR)
    assert set(finding.subjects) == set(NAMES)
    assert finding.ranks == RankSet([0, 1])
    assert "backward passes 2-4 of 4 added each rank's own" in finding.message
    assert "it was reduced in backward pass 1 of 4" in finding.message
    assert finding.location.line == 12


def test_of_many_ranks_it_is_reported_too():
    def coefficients_of(rank):
        return {**own(rank, 2), **mean(6)}

    (finding,) = judged(all_alike(coefficients_of, num_ranks=6, num_passes=2))
    assert finding.code == "SHD021"


def test_one_step_alone_may_have_a_reason():
    assert not judged(all_alike(off_by_one, num_passes=4, num_steps=1))


@pytest.mark.parametrize(
    "coefficients_of",
    [
        lambda _: mean(num_passes=4),
        lambda rank: own(rank, 4),
        lambda _: mean(num_passes=4, factor=1e-4),
        lambda _: {(0, 0): 0.7, (1, 0): 0.3, (0, 1): 0.6, (1, 1): 0.4},
        lambda _: {(0, 2): 0.5, (1, 2): 0.5},
    ],
    ids=["mean", "local steps", "clipped", "weights by tokens", "one pass of several"],
)
def test_what_may_be_meant_is_not_reported(coefficients_of):
    assert not judged(all_alike(coefficients_of, num_passes=4))


def test_shards_under_equal_names_are_the_ranks_own():
    def mixes(rank, _):
        shards = dict.fromkeys(NAMES[:5], Mix(off_by_one(rank), weight=0.5 + rank))
        return shards | dict.fromkeys(NAMES[5:], Mix(mean(num_passes=4)))

    assert not judged(view(mixes, num_passes=4))


# Ranks


def test_a_rank_whose_work_is_thrown_away_is_reported():
    (finding,) = judged(all_alike(lambda _: {(0, 0): 0.5, (1, 0): 0.5}, num_ranks=3))
    assert (finding.code, finding.severity, finding.grade) == (
        "SHD021",
        Severity.WARNING,
        Grade.LIKELY,
    )
    assert finding.ranks == RankSet([2])


def test_a_split_into_groups_is_no_more_than_a_note():
    (finding,) = judged(
        all_alike(lambda rank: {(r, 0): 0.5 for r in ((0, 1), (2, 3))[rank // 2]}, num_ranks=4)
    )
    assert finding.grade is Grade.NOTE


# Steps


def with_left(kept, factor=1.0):
    def mixes(_, before):
        return {
            name: Mix(mean(), tuple(factor * v for v in before.get(name, ())), kept)
            for name in NAMES
        }

    return view(mixes, num_steps=4)


@pytest.mark.parametrize("factor", [1.0, 65536.0])
def test_a_gradient_that_was_applied_before_is_reported(factor):
    (finding,) = judged(with_left(1 / factor, factor))
    assert (finding.code, finding.severity) == ("SHD022", Severity.ERROR)
    assert "that step 0 already applied" in finding.message


def test_only_those_that_are_not_cleared_are_named():
    def mixes(_, before):
        head = {name: Mix(mean(), before.get(name, ())) for name in NAMES[-2:]}
        return dict.fromkeys(NAMES[:-2], Mix(mean())) | head

    (finding,) = judged(view(mixes, num_steps=4))
    assert (finding.code, set(finding.subjects)) == ("SHD022", set(NAMES[-2:]))


def late(rank, before, num_passes=2):
    """The last pass comes with the first one of the next step."""
    earlier = {(r, num_passes - 1): 0.5 for r in (0, 1)} if before else {}
    return dict.fromkeys(NAMES, Mix(mean(), members=(0, 1), earlier=earlier))


def test_a_pass_that_comes_a_step_late_is_reported():
    (finding,) = judged(view(late, num_passes=2))
    assert (finding.code, finding.severity, finding.grade) == (
        "SHD021",
        Severity.ERROR,
        Grade.LIKELY,
    )
    assert "holds backward pass 1 of 2" in finding.message
    assert "backward pass 2 of 2 comes a step late" in finding.message
    assert "of the step before" in finding.evidence[0].summary


def test_whole_steps_that_come_late_may_be_meant():
    def mixes(rank, before):
        earlier = mean(num_passes=2) if before else {}
        return dict.fromkeys(NAMES, Mix({} if before else mean(num_passes=2), earlier=earlier))

    assert not judged(view(mixes, num_passes=2))


def test_a_gradient_that_is_cleared_later_is_not_reported():
    assert not judged(with_left(0.0))


def test_another_gradient_that_was_there_is_not_reported():
    left = (0.3, -0.4, 0.1, 0.2)
    mixes = {name: Mix(mean(), tuple(v * n for v in left)) for n, name in enumerate(NAMES, 1)}
    assert not judged(view(lambda *_: mixes))


# Factors


def test_a_loss_scale_that_nothing_was_multiplied_by_is_reported():
    shown = all_alike(lambda _: mean(factor=1 / 65536), loss_scale=65536.0, loss_factor=1.0)
    (finding,) = judged(shown)
    assert (finding.code, finding.severity) == ("SHD023", Severity.ERROR)
    assert "divided by the loss scale 65536" in finding.message


@pytest.mark.parametrize(
    ("factor", "values"),
    [
        (1 / 65536, {"loss_scale": 65536.0, "loss_factor": 65536.0}),
        (1 / 65536, {"loss_scale": 65536.0}),
        (1 / 65536, {}),
        (1.0, {"loss_scale": 65536.0, "loss_factor": 1.0}),
        (0.37 / 65536, {"loss_scale": 65536.0, "loss_factor": 1.0}),
    ],
    ids=["multiplied", "not known", "no scale", "not divided", "clipped as well"],
)
def test_a_loss_scale_that_is_used_or_not_known_is_not_reported(factor, values):
    assert not judged(all_alike(lambda _: mean(factor=factor), **values))


def odd(factor, names=NAMES[2:3], num_ranks=3, **values):
    def mixes(rank, before):
        plain = dict.fromkeys(NAMES, Mix(mean(num_ranks)))
        return plain | dict.fromkeys(names, Mix(mean(num_ranks, factor=factor), **values))

    return view(mixes, num_ranks=num_ranks)


@pytest.mark.parametrize(("factor", "words"), [(3.0, "3 times larger"), (1 / 3, "3 times smaller")])
def test_a_parameter_that_is_averaged_twice_or_not_at_all_is_reported(factor, words):
    (finding,) = judged(odd(factor))
    assert (finding.code, finding.severity, finding.subjects) == (
        "SHD023",
        Severity.WARNING,
        NAMES[2:3],
    )
    assert words in finding.message


@pytest.mark.parametrize(
    "shown",
    [odd(0.5), odd(3.0, names=NAMES[:4]), odd(1.0)],
    ids=["another factor", "many of them", "none"],
)
def test_another_rate_may_be_meant(shown):
    assert not judged(shown)


# Shards


def sharded(givers):
    def mixes(*_):
        return {n: Mix(c, members=(0, 1)) for n, c in zip(NAMES, givers, strict=True)}

    return view(mixes)


def test_shards_that_one_rank_steps_alone_are_reported():
    (finding,) = judged(sharded([own(0)] * 4 + [own(1)] * 4))
    assert (finding.code, finding.severity) == ("SHD004", Severity.ERROR)
    assert finding.ranks == RankSet([0, 1])
    assert set(finding.subjects) == set(NAMES)


def test_shards_that_are_summed_are_not_reported():
    assert not judged(sharded([mean()] * 8))


def test_shards_that_one_rank_steps_for_all_are_reported():
    assert [finding.code for finding in judged(sharded([own(0)] * 8))] == ["SHD004"]


# Gradients that are averaged by a wrapper, and then added up


def summed(*passes, num_steps=3, resummed=(0, 1, 2), **values):
    shown = losses(passes, passes, num_steps=num_steps, is_multiplied=True, **values)
    return replace(shown, resummed=resummed, sum_site=plain_site(31))


def test_averaged_gradients_that_are_added_up_are_reported():
    (finding,) = findings(MisscaledGradient, summed(mean_loss(20)))
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.LIKELY)
    assert "are reduced twice" in finding.message
    assert "2 times larger than the mean" in finding.message
    assert finding.location.line == 31


def test_where_the_loss_is_not_known_it_may_be_made_for_it():
    (finding,) = findings(MisscaledGradient, summed(None))
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    "shown",
    [
        summed(mean_loss(20), resummed=()),
        summed(mean_loss(20), resummed=(0,)),
        summed(mean_loss(20, over(2))),
        summed(part(20, 1 / 40, over(40))),
    ],
    ids=["never", "once", "a loss that was divided", "a count of all ranks"],
)
def test_a_sum_that_the_loss_is_made_for_is_not(shown):
    assert not findings(MisscaledGradient, shown)


# Gradients of an earlier step in the place of those of this one


def once_and_again(is_again):
    """The first step applies the mean of its gradients, later ones the same, or their own."""

    def mixes(_, before):
        old = {name: Mix({}, left=sums) for name, sums in before.items()}
        return old if before and is_again else dict.fromkeys(NAMES, Mix(mean()))

    return view(mixes)


def test_the_first_gradient_that_all_steps_apply_is_reported():
    (finding,) = findings(StaleGradient, replace(once_and_again(is_again=True), stale=frozenset()))
    assert "the steps 1, 2 apply the gradients of Net that step 0 has applied" in finding.message
    assert finding.severity is Severity.ERROR
    assert finding.location.line == 12


def test_steps_that_apply_their_own_are_not():
    assert not judged(once_and_again(is_again=False))


# Groups of ranks that sum the gradients of one model, each for itself


def grouped(size, weight=lambda _: 0.5):
    """Ranks average over groups of this size; `weight` is what a rank begins with."""

    def mixes(rank, _):
        first = rank - rank % size
        shares = {(other, 0): 1 / size for other in range(first, first + size)}
        return dict.fromkeys(NAMES, Mix(shares, weight=weight(rank)))

    return view(mixes, num_ranks=4)


def test_groups_that_sum_gradients_of_one_model_apart_are_a_note():
    (finding,) = judged(grouped(2))
    assert (finding.code, finding.grade) == ("SHD004", Grade.NOTE)
    assert "are summed over ranks 0-1 and ranks 2-3, each for itself" in finding.message
    assert set(finding.subjects) == set(NAMES)


@pytest.mark.parametrize(
    "shown",
    [grouped(4), grouped(1), grouped(2, weight=lambda rank: float(rank // 2))],
    ids=["all ranks", "each alone", "models of their own"],
)
def test_sums_over_all_or_of_other_models_are_not(shown):
    assert not judged(shown)
