"""Tests of the comparison of what modules return."""

import numpy as np

from distdiag.events.comparisons import Difference
from distdiag.parity.explanations import Pair
from distdiag.parity.outputs import is_reordered, output_pairs
from distdiag.parity.recorded_run import RecordedRun
from distdiag.record.recording import Kind, Record
from tests.parity.recordings import Rank

ROWS = np.random.default_rng(3).normal(size=(16, 3)) + 6


def recorded(folder, parts, *, num_elements=64, axis=0, shares_data=False):
    for rank, rows in enumerate(parts):
        writer = Rank(folder, rank, data_group=tuple(range(len(parts))))
        array = np.asarray(rows, np.float32)
        record = Record(
            Kind.OUTPUT, 0, 0, "Net/a#0", "float32", array.shape, part=array.shape,
            values=(num_elements, axis),
        )  # fmt: skip
        if shares_data:
            writer.batch(0, 0, "x", [1, 2])
            writer.values(Kind.LOSS, 0, "loss", 1.0 + rank)
        writer.writer.write(record, array.tobytes())
        writer.close(1, len(parts))
    return RecordedRun(folder, folder.name)


def ratio(tmp_path, parts, *, experts=(), of_reference=None, **more):
    known = of_reference or {}
    reference = recorded(tmp_path / "1", [ROWS], **known)
    noise = 1 + 1e-3 * np.random.default_rng(4).normal(size=ROWS.shape)
    perturbed = recorded(tmp_path / "perturbed", [ROWS * noise], **known)
    candidate = recorded(tmp_path / "n", parts, **more)
    pairs = list(output_pairs(reference, [reference, perturbed], candidate, 0, experts))
    return [pair.difference.ratio for pair in pairs]


def test_the_part_of_an_output_that_a_rank_has_is_not_compared(tmp_path):
    assert ratio(tmp_path, [2 * ROWS], num_elements=32) == []


def test_an_output_whose_samples_were_found_on_another_axis_is_not_compared(tmp_path):
    assert ratio(tmp_path, [2 * ROWS], axis=1) == []


def test_what_experts_return_is_not_compared(tmp_path):
    assert ratio(tmp_path, [2 * ROWS], experts=("Net/a",)) == []


def test_a_module_whose_name_begins_like_that_of_experts_is_compared(tmp_path):
    assert ratio(tmp_path, [2 * ROWS], experts=("Net/",))[0] > 1


def test_wrong_samples_of_one_rank_do_not_drown_in_those_of_the_others(tmp_path):
    parts = np.split(ROWS * (1 + 1e-4), 16)
    parts[7] = parts[7] * [1.02, 1.0, 1.0]
    together = ratio(tmp_path / "together", [np.concatenate(parts)])
    apart = ratio(tmp_path / "apart", parts)
    assert together[0] < 1 < apart[0]


def test_samples_in_another_order_over_the_ranks_are_the_same(tmp_path):
    parts = np.split(ROWS, 2)
    turned = [part[::-1] for part in parts]
    assert ratio(tmp_path / "right", turned)[0] < 1
    turned[1] = turned[1] + np.eye(8)[:, :3]
    assert ratio(tmp_path / "wrong", turned)[0] > 1


def test_rows_of_unknown_samples_are_compared_on_the_whole(tmp_path):
    """Such as of two batches that are put one behind the other on each rank."""
    one = {"axis": -1, "of_reference": {"axis": -1}}
    pairs = ROWS.reshape(8, 2, 3)
    mean, root = pairs[:, ::-1, 0].reshape(16), np.sqrt((pairs[:, :, 1] ** 2).mean(1))
    other = np.stack((mean, root.repeat(2), ROWS[:, 2] + 1), 1)
    assert ratio(tmp_path / "right", np.split(other, 2), **one)[0] < 1
    assert ratio(tmp_path / "wrong", np.split(1.1 * other, 2), **one)[0] > 1
    assert ratio(tmp_path / "known", np.split(other, 2))[0] > 1


def halves():
    """Figures of two halves of each sample that make `ROWS` of the whole, but in another order."""
    mean, root = ROWS[:, 0], ROWS[:, 1]
    first = np.stack((mean + 0.5, np.sqrt(root**2 + 2), np.ones(16)), 1)
    second = np.stack((mean - 0.5, np.sqrt(root**2 - 2), np.ones(16)), 1)
    return first, second


def test_the_parts_of_an_output_that_ranks_of_one_sequence_have_are_compared_together(tmp_path):
    first, second = halves()
    options = {"num_elements": 32, "shares_data": True}
    assert ratio(tmp_path / "right", [first, second], **options)[0] < 1
    assert ratio(tmp_path / "wrong", [first, second * 1.1], **options)[0] > 1


def test_parts_of_a_sum_that_ranks_of_one_batch_have_are_not_compared(tmp_path):
    assert ratio(tmp_path, [ROWS, 2 * ROWS], shares_data=True) == []


def test_the_same_values_in_another_order_are_reported_from_other_values():
    other = ROWS * [1 + 1e-7, 1 - 1e-7, 1.1]
    found = Difference(name="f()#0", measured=0.1, bound=1e-6, ratio=1e5)
    assert is_reordered(Pair(found, ROWS, other))
    assert not is_reordered(Pair(found, ROWS, 1.1 * ROWS))
    assert not is_reordered(Pair(found, ROWS[:, :2], other[:, :2]))
