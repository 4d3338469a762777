"""Coefficients are found again from weighted sums, for random programs, and accuse nobody."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdiag.events.gradients import GradientSum, GradientSums
from distdiag.views.contributions import (
    COARSE,
    contributions_of,
)
from tests.checks.streams import event_of, plain_site

NUM_SUMS = 4
DTYPES = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": COARSE}


def rounded(values, unit):
    """Round each number as a type with this half unit in the last place does."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa / (2 * unit)) * (2 * unit), exponent)


class Program:
    """A program of some ranks, of which each pass gives a gradient for each parameter."""

    def __init__(self, seed, num_ranks, num_passes, num_names, unit, num_elements=48):
        self.random = np.random.default_rng(seed)
        self.num_ranks, self.num_passes, self.unit = num_ranks, num_passes, unit
        self.names = [f"layers.{number}.weight" for number in range(num_names)]
        self.weights = self.random.uniform(-1, 1, (NUM_SUMS, num_elements))
        shape = (num_ranks, num_passes, num_elements)
        sizes = 10.0 ** self.random.uniform(-4, 1, num_names)
        self.given = {
            name: rounded(self.random.normal(size=shape) * size, unit)
            for name, size in zip(self.names, sizes, strict=True)
        }

    def applied(self, name, coefficients):
        """Add up pass by pass and rank by rank; each sum is rounded."""
        total = np.zeros(self.weights.shape[1])
        for rank in range(self.num_ranks):
            for number in range(self.num_passes):
                part = rounded(
                    coefficients[rank, number] * self.given[name][rank, number], self.unit
                )
                total = rounded(total + part, self.unit)
        return total

    def events(self, coefficients_of, num_shards=1):
        """Return what the ranks tell: all apply the same, or as many shards of it."""
        found = {}
        for rank in range(self.num_ranks):
            gradients = []
            for name in self.names:
                applied = self.applied(name, coefficients_of(name, rank))
                members = tuple(range(self.num_ranks)) if num_shards > 1 else ()
                if members:
                    cut = np.array_split(np.arange(applied.size), self.num_ranks)[rank]
                    applied = np.where(np.isin(np.arange(applied.size), cut), applied, 0.0)
                given = self.given[name][rank]
                gradients.append(
                    GradientSum(
                        name,
                        applied.size,
                        members,
                        int(bool(members)),
                        0.5,
                        tuple(tuple(map(float, self.weights @ each)) for each in given),
                        tuple(float(np.linalg.norm(each)) for each in given),
                        (),
                        tuple(map(float, self.weights @ applied)),
                        self.unit,
                    )
                )
            found[rank] = event_of(
                GradientSums,
                rank,
                step=0,
                model="Net",
                gradients=tuple(gradients),
                nodes=(),
                site=plain_site(3),
                num_passes=self.num_passes,
            )
        return found


programs = st.builds(
    Program,
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.integers(2, 6),
    num_passes=st.integers(1, 3),
    num_names=st.integers(14, 24),
    unit=st.sampled_from(sorted(DTYPES.values())),
)


def check_recovered(program, seed, *, sharded):
    """One vector for all: it is found, within what each type rounds, and nobody is an outlier."""
    numbers = np.random.default_rng(seed)
    shape = (program.num_ranks, program.num_passes)
    vector = numbers.choice([0.0, 0.25, 0.5, 1.0, 2.0], size=shape)
    vector[0, 0] = 1.0  # something is applied
    events = program.events(lambda *_: vector, program.num_ranks if sharded else 1)
    found = list(contributions_of(0, events))
    for each in found:
        assert not each.outliers
        for source, value in each.vector.items():
            (rank,) = source.ranks
            expected = vector[rank, max(source.number, 0)]
            if source.number >= 0:
                # 48 elements, each rounded once for each addend and each sum.
                off = 4 * program.unit * vector.size * max(vector.max(), 1.0)
                assert abs(value - expected) <= off + 1e-9
    if program.unit < DTYPES["float16"]:
        assert [each.is_sharded for each in found] == [sharded]


def check_outlier(program, seed):
    """A few that differ are found, and no other is named."""
    numbers = np.random.default_rng(seed)
    shape = (program.num_ranks, program.num_passes)
    odd = set(numbers.choice(program.names, size=3, replace=False))
    mean, factor = np.full(shape, 1 / program.num_ranks), float(program.num_ranks)
    kind = numbers.choice(["own", "scaled"])

    def coefficients_of(name, rank):
        if name not in odd:
            return mean
        own = np.zeros(shape)
        own[rank] = 1.0
        return own if kind == "own" else factor * mean

    is_fine = program.unit < DTYPES["float16"]  # else some cannot be told apart
    found = list(contributions_of(0, program.events(coefficients_of)))
    for each in found:
        named = {outlier.name for outlier in each.outliers}
        assert named == odd if is_fine else named <= odd
        for outlier in each.outliers:
            if kind == "own" and (is_fine or outlier.giver is not None):
                assert (outlier.giver,) == each.ranks
            if kind == "scaled" and (is_fine or outlier.factor is not None):
                assert outlier.factor == pytest.approx(factor, rel=0.05)
    assert found or not is_fine


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs, seeds, st.booleans())
def test_the_vector_is_found(program, seed, sharded):
    check_recovered(program, seed, sharded=sharded)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs, seeds)
def test_who_does_not_share_it_is_found(program, seed):
    check_outlier(program, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=int(os.environ.get("DISTDIAG_CASES", "5000")), deadline=None)
@given(programs, seeds, st.booleans())
def test_the_vector_is_found_in_many_programs(program, seed, sharded):
    check_recovered(program, seed, sharded=sharded)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=int(os.environ.get("DISTDIAG_CASES", "5000")), deadline=None)
@given(programs, seeds)
def test_who_does_not_share_it_is_found_in_many_programs(program, seed):
    check_outlier(program, seed)
