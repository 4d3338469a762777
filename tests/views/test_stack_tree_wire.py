"""The form in which trees of stacks travel: what comes back, how small it is, what is refused."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distdiag.events.base import Frame
from distdiag.events.errors import DamagedFileError
from distdiag.events.ranks import RankSet
from distdiag.views.stack_tree import MAIN, MOST_RANKS, StackTree, TreeDecoder, encode_tree

FRAMES = [Frame(f"file{n % 3}.py", n, "f", n % 2 == 0) for n in range(6)]
RANKS = st.sets(st.integers(0, MOST_RANKS - 1), min_size=1, max_size=20).map(RankSet)
STACKS = st.lists(st.sampled_from(FRAMES), max_size=5).map(tuple)
TREES = st.builds(
    StackTree,
    st.dictionaries(st.text(max_size=5), st.dictionaries(STACKS, RANKS, max_size=4), max_size=3),
    st.dictionaries(st.text(max_size=5), RANKS, max_size=2),
)
TREE = StackTree({MAIN: {(FRAMES[0], FRAMES[1]): RankSet([3, 4, 6, 7, 8, 9])}}, {})


@given(TREES)
@example(TREE)
def test_a_tree_comes_back_as_it_was(tree):
    assert TreeDecoder().decode(encode_tree(tree)) == tree


def test_equal_stacks_of_several_trees_become_one_object():
    decoder = TreeDecoder()
    first, second = (decoder.decode(encode_tree(TREE)).groups()[0].frames for _ in range(2))
    assert first is second
    assert first is not TREE.groups()[0].frames


def test_a_hundred_thousand_ranks_stay_small():
    together = StackTree({MAIN: {tuple(FRAMES): RankSet(range(100_000))}}, {})
    scattered = {(frame,): RankSet(range(n, 100_000, 6)) for n, frame in enumerate(FRAMES)}
    assert len(encode_tree(together)) < 200
    assert len(encode_tree(StackTree({MAIN: scattered}, {}))) < 2.1 * 100_000


ONE_STACK = [["a.py", 1, "f", True]]


@pytest.mark.parametrize(
    ("wire", "problem"),
    [
        (7, "Expected `array`, got `int`"),
        ([ONE_STACK, {MAIN: [[[1], [0, 1]]]}, {}], "refers to a frame that is not there"),
        ([ONE_STACK, {MAIN: [[[-1], [0, 1]]]}, {}], "refers to a frame that is not there"),
        ([ONE_STACK, {MAIN: [[[0], [0, 1, 5]]]}, {}], "cut off"),
        ([ONE_STACK, {MAIN: [[[0], []]]}, {}], "empty"),
        ([ONE_STACK, {MAIN: [[[0], [0, 0]]]}, {}], "out of bounds"),
        ([ONE_STACK, {MAIN: [[[0], [-1, 1]]]}, {}], "out of bounds"),
        ([ONE_STACK, {MAIN: [[[0], [0, 1 << 62]]]}, {}], "out of bounds"),
        ([ONE_STACK, {MAIN: [[[0] * n, [0, MOST_RANKS]] for n in range(9)]}, {}], "out of bounds"),
        ([ONE_STACK, {}, {"gone": [MOST_RANKS, 1]}], "out of bounds"),
    ],
)
def test_what_is_no_tree_is_refused_in_one_line(wire, problem):
    with pytest.raises(DamagedFileError, match=problem) as refused:
        TreeDecoder().decode(msgspec.msgpack.encode(wire))
    assert str(refused.value).startswith("a tree of stacks is damaged: ")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_tree_or_are_refused(data):
    try:
        TreeDecoder().decode(data)
    except DamagedFileError as error:
        assert "\n" not in str(error)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_tree_with_one_wrong_byte_is_a_tree_or_is_refused(place, byte):
    data = bytearray(encode_tree(TREE))
    data[place % len(data)] = byte
    try:
        tree = TreeDecoder().decode(data)
    except DamagedFileError:
        return
    assert all(rank < MOST_RANKS for rank in tree.ranks)
