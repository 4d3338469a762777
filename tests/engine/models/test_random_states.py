"""Which states of generators are put side by side."""

from distdiag.engine.models.aligner import RandomStreams
from distdiag.events.models import Moment
from tests.checks.rep.test_rng_mismatch import PAIR, draw, state


def fed(*events):
    streams = RandomStreams()
    return [found for event in events for found in streams.add(event)]


def test_a_draw_is_shown_when_all_ranks_of_the_mesh_have_told_it():
    assert not fed(draw(0, "a"))
    (found,) = fed(draw(0, "a"), draw(1, "b"))
    assert {rank: event.digest for rank, event in found.by_rank.items()} == {0: "a", 1: "b"}


def test_draws_on_other_meshes_are_not_mixed():
    assert not fed(draw(0, "a"), draw(1, "b", members=(1, 2)))


def test_the_same_moment_may_come_again():
    start = Moment.START
    first = [state(rank, start, cpu="a") for rank in PAIR]
    second = [state(rank, start, cpu="b") for rank in PAIR]
    assert len(fed(first[0], second[0], first[1], second[1])) == 2


def test_ranks_that_share_nothing_are_not_compared():
    assert not fed(draw(0, "a", members=()), draw(1, "b", members=()))
