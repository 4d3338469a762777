"""Tests of where the parts of parameters belong that each rank holds others of."""

import numpy as np
import pytest

from distdiag.parity.parts import experts_of, find_spots, num_parts
from distdiag.parity.recorded_run import RecordedRun
from distdiag.record.recording import Kind
from tests.parity.recordings import Rank

RANDOM = np.random.default_rng(0)
STACKED = RANDOM.normal(size=(4, 8, 6)).astype(np.float32)
LEFT, RIGHT = np.split(STACKED, 2)
ZEROS = np.zeros((4, 6), np.float32)


@pytest.fixture
def record(tmp_path):
    def record(label, *ranks, factor=1.0):
        for rank, held in enumerate(ranks):
            writer = Rank(tmp_path / label, rank)
            for name, array in held.items():
                writer.tensor(Kind.START, 0, name, array)
            for name, array in held.items():
                writer.tensor(Kind.GRADIENT, 0, name, factor * array)
            writer.close(1, len(ranks))
        return RecordedRun(tmp_path / label, label)

    return record


def test_stacked_experts_of_all_ranks_are_put_together(record):
    one = record("one", {"Net/experts.up": STACKED})
    two = record("two", {"Net/experts.up": LEFT}, {"Net/experts.up": RIGHT}, factor=2)
    spots = find_spots(one, two)
    assert spots[0, "Net/experts.up"].at == (0, 0, 0)
    assert spots[1, "Net/experts.up"].at == (2, 0, 0)
    assert num_parts(spots) == 2
    whole = two.with_parts_at(spots).whole(Kind.GRADIENT, 0, "Net/experts.up")
    assert np.array_equal(whole, 2 * STACKED)


def test_parts_in_another_order_than_that_of_the_ranks_are_put_where_they_belong(record):
    one = record("one", {"Net/up": STACKED})
    two = record("two", {"Net/up": RIGHT}, {"Net/up": LEFT})
    spots = find_spots(one, two)
    assert np.array_equal(two.with_parts_at(spots).whole(Kind.START, 0, "Net/up"), STACKED)


def test_columns_of_a_matrix_are_put_together_too(record):
    whole = STACKED[0]
    one = record("one", {"Net/up": whole})
    two = record("two", *({"Net/up": part} for part in np.split(whole, 2, axis=1)))
    spots = find_spots(one, two)
    assert np.array_equal(two.with_parts_at(spots).whole(Kind.START, 0, "Net/up"), whole)


def test_experts_that_each_rank_counts_from_zero_get_the_numbers_of_the_whole(record):
    names = [f"Net/layers.0.experts.{number}.weight" for number in range(4)]
    one = record("one", dict(zip(names, STACKED, strict=True)))
    two = record("two", *(dict(zip(names[:2], part, strict=True)) for part in (LEFT, RIGHT)))
    spots = find_spots(one, two)
    assert spots[1, names[0]].name == names[2]
    moved = two.with_parts_at(spots)
    for name, array in zip(names, STACKED, strict=True):
        assert np.array_equal(moved.whole(Kind.GRADIENT, 0, name), array)


def test_biases_of_zeros_go_where_the_weights_beside_them_go(record):
    one = record("one", {"Net/experts.up": STACKED, "Net/experts.bias": ZEROS})
    two = record(
        "two", *({"Net/experts.up": part, "Net/experts.bias": ZEROS[:2]} for part in (LEFT, RIGHT))
    )
    spots = find_spots(one, two)
    assert spots[0, "Net/experts.bias"].at == (0, 0)
    assert spots[1, "Net/experts.bias"].at == (2, 0)


def test_numbered_biases_of_zeros_go_with_their_weights(record):
    def expert(number, array):
        bias = np.zeros(6, np.float32)
        return {f"Net/experts.{number}.weight": array, f"Net/experts.{number}.bias": bias}

    one = record(
        "one", {k: v for n, part in enumerate(STACKED) for k, v in expert(n, part).items()}
    )
    two = record("two", *({**expert(0, part[0]), **expert(1, part[1])} for part in (LEFT, RIGHT)))
    spots = find_spots(one, two)
    assert spots[1, "Net/experts.1.bias"].name == "Net/experts.3.bias"
    assert spots[0, "Net/experts.1.bias"].name == "Net/experts.1.bias"


@pytest.mark.parametrize(
    "parts",
    [(LEFT, LEFT), (LEFT, RIGHT + 1), (STACKED, STACKED), (STACKED, STACKED + 1)],
    ids=["twice", "drawn anew", "copies", "copies that differ"],
)
def test_what_is_not_the_whole_in_parts_stays_where_it_is(record, parts):
    one = record("one", {"Net/up": STACKED})
    assert find_spots(one, record("two", *({"Net/up": part} for part in parts))) == {}


def test_parts_of_parts_on_a_mesh_are_put_together(tmp_path, record):
    one = record("one", {"Net/up": STACKED})
    for rank in range(4):
        island = (rank % 2, rank % 2 + 2)
        held = (LEFT, RIGHT)[rank % 2][rank // 2 : rank // 2 + 1]
        writer = Rank(tmp_path / "four", rank)
        writer.tensor(
            Kind.START, 0, "Net/up", held, whole=(2, 8, 6), at=(rank // 2, 0, 0), among=island
        )
        writer.close(1, 4)
    four = RecordedRun(tmp_path / "four", "four")
    moved = four.with_parts_at(find_spots(one, four))
    assert np.array_equal(moved.whole(Kind.START, 0, "Net/up"), STACKED)


def test_modules_of_experts_are_those_that_hold_nothing_else(record):
    router = {"Net/moe.gate.weight": STACKED[0]}
    one = record("one", {**router, "Net/moe.experts.up": STACKED})
    two = record("two", *({**router, "Net/moe.experts.up": part} for part in (LEFT, RIGHT)))
    assert experts_of(one, find_spots(one, two)) == {"Net/moe.experts"}


def test_rows_of_a_matrix_make_no_experts(record):
    whole = STACKED[0]
    one = record("one", {"Net/up.weight": whole})
    two = record("two", *({"Net/up.weight": part} for part in np.split(whole, 2)))
    spots = find_spots(one, two)
    assert num_parts(spots) == 2
    assert experts_of(one, spots) == frozenset()
