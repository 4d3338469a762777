"""Norms by which gradients are clipped, seen from what is left of the gradients."""

from dataclasses import replace
from math import hypot, sqrt

import pytest

from distdiag.checks.shd.miscounted_gradient_norm import MiscountedGradientNorm
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.updates import NormView, StepNorms
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings

GRADIENTS = ((3.0, 1.0), (4.0, 1.5), (5.0, 1.2), (2.0, 0.9))
"""At each step: the norm of what two ranks hold in parts, and of what both hold."""


def clipped(norm, bound=1.0, gradients=GRADIENTS):
    """The norms after gradients were clipped to a bound by a norm that a program computes."""
    steps = []
    for step, (parts, shared) in enumerate(gradients):
        factor = min(1.0, bound / norm(parts, shared))
        whole, counted = hypot(parts, shared), sqrt(parts**2 + 2 * shared**2)
        steps.append(StepNorms(step, *(factor * n for n in (whole, counted, parts, shared))))
    return NormView("Net", RankSet([0, 1]), tuple(steps), plain_site(12))


def twice(parts, shared):
    return sqrt(parts**2 + 2 * shared**2)


@pytest.mark.parametrize(
    ("norm", "grade", "words"),
    [
        (twice, Grade.LIKELY, "counts what several ranks hold alike once for each of them"),
        (lambda parts, _: parts, Grade.NOTE, "leaves out what several ranks hold alike"),
        (lambda _, shared: shared, Grade.NOTE, "leaves out what ranks hold in parts"),
    ],
    ids=["twice", "parts", "shared"],
)
def test_a_norm_that_counts_wrongly_is_reported(norm, grade, words):
    (finding,) = findings(MiscountedGradientNorm, clipped(norm, 0.5))
    assert finding.grade is grade
    assert (finding.severity is Severity.ERROR) == (grade is Grade.LIKELY)
    assert words in finding.message
    assert finding.location.line == 12


def test_a_norm_of_what_each_rank_holds_is_reported_as_such():
    view = clipped(hypot, 0.5)
    steps = [
        StepNorms(each.step, hypot(0.1 * n, 0.7), sqrt(0.5), 0.7 - 0.1 * n, 0.1 * n, (0.5, 0.5))
        for n, each in enumerate(view.steps)
    ]
    (finding,) = findings(MiscountedGradientNorm, replace(view, steps=tuple(steps)))
    assert "each rank takes of its own part alone" in finding.message
    assert finding.severity is Severity.ERROR


def test_some_steps_need_no_clipping():
    (finding,) = findings(MiscountedGradientNorm, clipped(twice, 2.5))
    assert "at 3 steps" in finding.message


@pytest.mark.parametrize(
    "view",
    [
        clipped(hypot),
        clipped(twice, 100.0),
        clipped(twice, 3.0, GRADIENTS[:2]),
        clipped(twice, gradients=((3.0, 1.0), (6.0, 2.0), (9.0, 3.0))),
        clipped(lambda parts, shared: parts + shared),
        clipped(hypot, gradients=((3.0, 0.0), (4.0, 0.0), (5.0, 0.0))),
    ],
    ids=["right", "not clipped", "too few", "not told apart", "something else", "one kind"],
)
def test_other_norms_are_silent(view):
    assert not findings(MiscountedGradientNorm, view)


@pytest.mark.parametrize(
    ("factor", "bound", "words"),
    [
        (sqrt(2), 0.1, "to the norm 0.0707107, which is a round number but for the root of 2"),
        (1 / sqrt(2), 1.0, "may be 1.414 times too large, or too small"),
    ],
)
def test_a_bound_that_only_the_number_of_ranks_makes_odd_is_a_note(factor, bound, words):
    view = clipped(lambda parts, shared: factor * hypot(parts, shared), bound)
    (finding,) = findings(MiscountedGradientNorm, view)
    assert finding.grade is Grade.NOTE
    assert words in finding.message


@pytest.mark.parametrize("bound", [1.0, 0.5, 0.25, 0.123])
def test_other_bounds_are_silent(bound):
    assert not findings(MiscountedGradientNorm, clipped(hypot, bound))
