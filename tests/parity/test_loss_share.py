"""Tests of what the gradients tell of the part of a loss that differs."""

from distdiag.events.comparisons import Difference
from distdiag.parity.losses import share_of


def gradient(name, ratio, bound=1e-6):
    return Difference(name=f"Net/{name}", measured=ratio * bound, bound=bound, ratio=ratio)


def test_what_differs_only_before_a_router_is_the_share_of_its_own_loss():
    found = share_of([gradient("head", 0.1), gradient("gate", 900), gradient("embedding", 800)])
    assert [each.name for each in found.differing] == ["Net/gate", "Net/embedding"]
    assert "reaches gate" in found.explanation and "such as head" in found.explanation


def test_where_all_gradients_differ_it_may_be_the_whole_loss():
    assert share_of([gradient("head", 50), gradient("gate", 900)]) is None


def test_a_gradient_of_zero_does_not_count_as_agreeing():
    assert share_of([gradient("unused", 0.0, bound=0.0), gradient("gate", 900)]) is None


def test_gradients_that_all_agree_tell_nothing():
    assert share_of([gradient("head", 0.1)]) is None
