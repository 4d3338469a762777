"""How the models of ranks are compared when they begin to train."""

import math

from distdiag.engine.sequences import FirstLooks
from distdiag.events.gradients import GradientSum, GradientSums
from distdiag.views.sequences import Likeness
from tests.checks.streams import plain_site


def told(rank, weights, *, step=0, size=8, members=()):
    gradients = tuple(
        GradientSum(name, size, members, len(members), weight, 0.0, 1.0, 1.0, 1.0)
        for name, weight in weights.items()
    )
    fields = {"seq": 0, "time_ns": 0, "passages": (), "site": plain_site(3)}
    return GradientSums(rank=rank, step=step, model="Model", gradients=gradients, **fields)


def likeness(*events):
    looks = FirstLooks()
    for event in events:
        looks.feed(event)
    return looks.likeness((0, 1))


def test_models_with_the_same_weights_are_equal():
    weights = {"a": 1.0, "b": 2.0}
    assert likeness(told(0, weights), told(1, weights)) is Likeness.EQUAL


def test_a_part_of_its_own_leaves_models_equal():
    one, other = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.0, "b": 2.0, "c": 4.0}
    assert likeness(told(0, one), told(1, other)) is Likeness.EQUAL


def test_other_weights_are_other_values():
    assert likeness(told(0, {"a": 1.0}), told(1, {"a": 2.0})) is Likeness.OTHER_VALUES


def test_only_the_first_look_counts():
    later = told(1, {"a": 2.0}, step=1)
    assert likeness(told(0, {"a": 1.0}), told(1, {"a": 1.0}), later) is Likeness.EQUAL


def test_other_names_or_sizes_are_other_models():
    assert likeness(told(0, {"a": 1.0}), told(1, {"b": 1.0})) is Likeness.OTHER_MODELS
    assert likeness(told(0, {"a": 1.0}), told(1, {"a": 1.0}, size=9)) is Likeness.OTHER_MODELS


def test_what_was_not_seen_at_the_same_step_is_unknown():
    assert likeness(told(0, {"a": 1.0})) is Likeness.UNKNOWN
    assert likeness(told(0, {"a": 1.0}), told(1, {"a": 2.0}, step=1)) is Likeness.UNKNOWN


def test_shards_and_what_could_not_be_read_are_not_compared():
    one, other = told(0, {"a": 1.0}, members=(0, 1)), told(1, {"a": 2.0}, members=(0, 1))
    assert likeness(one, other) is Likeness.EQUAL
    assert likeness(told(0, {"a": math.nan}), told(1, {"a": 2.0})) is Likeness.EQUAL
