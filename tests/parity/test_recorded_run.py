"""Tests of recordings: what the ranks wrote is put together by name."""

import numpy as np
import pytest

from distdiag.events.errors import DamagedFileError
from distdiag.events.ranks import RankSet
from distdiag.parity.recorded_run import RecordedRun
from distdiag.record.recording import Kind, Record
from tests.parity.recordings import Rank


def test_shards_of_two_ranks_are_one_tensor(tmp_path):
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    for rank in range(2):
        writer = Rank(tmp_path, rank)
        part = whole[2 * rank : 2 * rank + 2]
        writer.tensor(Kind.GRADIENT, 0, "w", part, whole=(4, 3), at=(2 * rank, 0))
        writer.close(1, 2)
    found = RecordedRun(tmp_path, "2 ranks").whole(Kind.GRADIENT, 0, "w")
    assert np.array_equal(found, whole)


def test_a_missing_shard_makes_no_tensor(tmp_path):
    writer = Rank(tmp_path, 0)
    writer.tensor(Kind.GRADIENT, 0, "w", np.ones((2, 3)), whole=(4, 3))
    writer.close(1, 2)
    assert RecordedRun(tmp_path, "2 ranks").whole(Kind.GRADIENT, 0, "w") is None


def test_bfloat16_is_read_exactly(tmp_path):
    rank = Rank(tmp_path, 0)
    bits = np.array([0x3F80, 0xBF00, 0x4049], dtype=np.uint16)  # 1, -0.5, 3.140625
    record = Record(Kind.START, 0, 0, "w", "bfloat16", (3,), (0,), (3,))
    rank.writer.write(record, bits.tobytes())
    rank.close(1, 1)
    run = RecordedRun(tmp_path, "1 rank")
    assert run.whole(Kind.START, 0, "w").tolist() == [1.0, -0.5, 3.140625]
    assert run.unit(Kind.START, 0, "w") == 2.0**-7


def test_unlike_copies_are_reported_by_rank(tmp_path):
    for rank, value in enumerate((1.0, 1.0, 2.0)):
        writer = Rank(tmp_path, rank)
        writer.tensor(Kind.GRADIENT, 0, "w", [value], writes=rank == 0)
        writer.tensor(Kind.GRADIENT, 0, "b", [5.0], writes=rank == 0)
        writer.close(1, 3)
    found = RecordedRun(tmp_path, "3 ranks").differing_replicas(Kind.GRADIENT, 0)
    assert list(found) == ["w"]
    assert sorted(found["w"].values(), key=str) == [RankSet([0, 1]), RankSet([2])]


def test_a_wrapper_tells_the_data_coordinates(tmp_path):
    for rank, group in enumerate([(0, 2), (1, 3), (0, 2), (1, 3)]):
        Rank(tmp_path, rank, data_group=group).close(1, 4)
    assert RecordedRun(tmp_path, "4 ranks").coordinates == ((0, 1), (2, 3))


def test_without_a_wrapper_ranks_with_equal_batches_are_one_coordinate(tmp_path):
    for rank, values in enumerate([[1, 2], [1, 2], [3, 4]]):
        writer = Rank(tmp_path, rank)
        writer.batch(0, 0, "x", values)
        writer.close(1, 3)
    assert RecordedRun(tmp_path, "3 ranks").coordinates == ((0, 1), (2,))


def test_a_record_that_was_cut_off_is_left_out(tmp_path):
    writer = Rank(tmp_path, 0)
    writer.tensor(Kind.START, 0, "w", [1.0])
    writer.tensor(Kind.START, 0, "b", [2.0])
    writer.close(1, 1)
    index = tmp_path / "rank-0.index"
    index.write_bytes(index.read_bytes()[:-3])
    assert RecordedRun(tmp_path, "1 rank").names(Kind.START, 0) == ["w"]


def test_foreign_files_are_one_clear_error(tmp_path):
    Rank(tmp_path, 0).close(1, 1)
    (tmp_path / "rank-0.index").write_bytes(b"\x04\0\0\0junk")
    with pytest.raises(DamagedFileError, match="not the index of a recording"):
        RecordedRun(tmp_path, "1 rank")
    with pytest.raises(DamagedFileError, match="no rank has recorded"):
        RecordedRun(tmp_path / "empty", "1 rank")


def test_ranks_in_the_same_place_of_groups_that_are_too_small_are_not_one_coordinate(tmp_path):
    for rank, group in enumerate([(0, 1), (0, 1), (2, 3), (2, 3)]):
        writer = Rank(tmp_path, rank, data_group=group)
        writer.batch(0, 0, "x", [rank, rank])
        writer.close(1, 4)
    assert RecordedRun(tmp_path, "4 ranks").coordinates == ((0,), (2,), (1,), (3,))


def test_the_coarsest_dtype_of_all_ranks_is_what_a_run_computes_in(tmp_path):
    for rank, dtype in enumerate(("float32", "bfloat16", "")):
        Rank(tmp_path, rank, compute_dtype=dtype).close(1, 3)
    run = RecordedRun(tmp_path, "3 ranks")
    assert (run.compute_dtype, run.compute_unit) == ("bfloat16", 2.0**-7)


def test_a_run_repeats_another_as_far_as_it_went(tmp_path):
    for name, num_steps, last in (("whole", 3, 1.0), ("short", 2, 1.0), ("other", 2, 1.5)):
        writer = Rank(tmp_path / name, 0)
        writer.tensor(Kind.START, 0, "w", [last])
        for step in range(num_steps):
            writer.tensor(Kind.GRADIENT, step, "w", [last if step else 1.0])
        writer.close(num_steps, 1)
    whole, short, other = (
        RecordedRun(tmp_path / name, name) for name in ("whole", "short", "other")
    )
    assert short.repeats(whole)
    assert not other.repeats(whole)
    assert short.repeats(whole, (Kind.START,))
    assert not other.repeats(whole, (Kind.START,))


@pytest.mark.parametrize(
    ("losses", "coordinates"), [((2.0, 2.5), ((0, 1),)), ((2.0, 2.0), ((0,), (1,)))]
)
def test_ranks_that_make_other_losses_of_the_same_batches_have_parts_of_them(
    tmp_path, losses, coordinates
):
    for rank, loss in enumerate(losses):
        writer = Rank(tmp_path, rank, data_group=(0, 1))
        writer.batch(0, 0, "x", [1, 2])
        writer.values(Kind.LOSS, 0, "loss", loss)
        writer.close(1, 2)
    assert RecordedRun(tmp_path, "2 ranks").coordinates == coordinates
