"""Stacks of many ranks as one tree: groups, merging, and where paths part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdiag.events.base import Frame
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.views.stack_tree import MAIN, StackTree, merge, parted

LINES = {
    "module": Frame("train.py", 90, "<module>"),
    "main": Frame("train.py", 57, "main"),
    "evaluates": Frame("train.py", 41, "main"),
    "evaluate": Frame("train.py", 12, "evaluate"),
    "reduce": Frame("torch/distributed.py", 7, "all_reduce", user=False),
}


def path(*names):
    """Return a stack, written from the outermost frame inwards."""
    return tuple(LINES[name] for name in reversed(names))


WAITS = path("module", "main", "reduce")
EVALUATES = path("module", "evaluates", "evaluate")


def dump(rank, frames=WAITS, *others, error=""):
    threads = () if error else (ThreadStack(MAIN, frames), *others)
    return Stacks(rank=rank, seq=-1, time_ns=0, source="test", threads=threads, error=error)


def tree(*dumps):
    return StackTree.from_stacks(dumps)


def test_equal_stacks_are_one_group_and_the_largest_comes_first():
    made = tree(dump(0, EVALUATES), *(dump(rank) for rank in (3, 1, 2)))
    groups = [(group.frames, str(group.ranks)) for group in made.groups()]
    assert groups == [(WAITS, "1-3"), (EVALUATES, "0")]


def test_every_node_has_its_frame_and_the_ranks_that_pass_through_it():
    made = tree(dump(0), dump(1), dump(2, EVALUATES), dump(3, path("module")))
    (module,) = made.root().children
    assert (module.frame, module.ranks) == (LINES["module"], RankSet(range(4)))
    below = {node.frame: str(node.ranks) for node in module.children}
    assert below == {LINES["main"]: "0-1", LINES["evaluates"]: "2", None: "3"}


def test_the_odd_rank_parts_from_the_majority_below_the_last_common_frame():
    (parting,) = parted(tree(dump(0), dump(1), dump(2), dump(3, EVALUATES)))
    assert parting.common == path("module")
    ways = [(branch.frame, str(branch.ranks)) for branch in parting.branches]
    assert ways == [(LINES["main"], "0-2"), (LINES["evaluates"], "3")]
    assert parting.odd_ranks == RankSet([3])


def test_each_place_where_ranks_leave_the_majority_is_reported_outermost_first():
    made = tree(dump(0), dump(1), dump(2), dump(3, EVALUATES), dump(4, path("module", "main")))
    outer, inner = parted(made)
    assert (outer.odd_ranks, inner.odd_ranks) == (RankSet([3]), RankSet([4]))
    assert inner.common == path("module", "main")
    assert (inner.branches[1].frame, inner.branches[1].ranks) == (None, RankSet([4]))


def test_equal_camps_have_no_majority():
    (parting,) = parted(tree(dump(0), dump(1, EVALUATES)))
    assert (parting.majority, parting.odd_ranks) == (None, RankSet())
    assert [str(branch.ranks) for branch in parting.branches] == ["0", "1"]


def test_the_smaller_camp_is_not_followed():
    deeper = path("module", "evaluates", "evaluate", "reduce")
    made = tree(*(dump(rank) for rank in range(3)), dump(3, EVALUATES), dump(4, deeper))
    assert [str(parting.odd_ranks) for parting in parted(made)] == ["3-4"]


@pytest.mark.parametrize("dumps", [(), (dump(0), dump(1)), (dump(0),), (dump(0, error="gone"),)])
def test_ranks_that_are_together_part_nowhere(dumps):
    assert parted(tree(*dumps)) == ()


def test_paths_may_part_at_the_outermost_frame():
    (parting,) = parted(tree(dump(0), dump(1), dump(2, path("evaluate"))))
    assert (parting.common, parting.odd_ranks) == ((), RankSet([2]))


def test_threads_that_differ_by_numbers_only_are_one():
    made = tree(
        dump(0, WAITS, ThreadStack("Thread-3 (read)", path("evaluate"))),
        dump(1, WAITS, ThreadStack("Thread-5 (read)", path("evaluate"))),
        dump(2, WAITS, ThreadStack("Thread-5 (write)", path("evaluate"))),
    )
    assert list(made.threads) == [MAIN, "Thread-# (read)", "Thread-# (write)"]
    (readers,) = made.groups("Thread-# (read)")
    assert (readers.frames, readers.ranks) == (path("evaluate"), RankSet([0, 1]))
    assert made.groups("no such thread") == ()


def test_a_rank_counts_once_among_several_threads_of_one_kind():
    pool = [ThreadStack(f"pool_{n}", path("evaluate")) for n in range(3)]
    (group,) = tree(dump(5, WAITS, *pool)).groups("pool_#")
    assert group.ranks == RankSet([5])


def test_the_thread_that_runs_the_users_code_is_the_main_one_when_none_has_the_name():
    threads = (ThreadStack("1", path("reduce")), ThreadStack("2", EVALUATES))
    stacks = Stacks(rank=0, seq=-1, time_ns=0, source="test", threads=threads)
    made = tree(stacks)
    assert [group.frames for group in made.groups()] == [EVALUATES]
    assert [group.frames for group in made.groups("#")] == [path("reduce")]


def test_a_second_thread_of_the_main_name_does_not_count_as_the_rank():
    made = tree(dump(0, WAITS, ThreadStack(MAIN, EVALUATES)))
    assert [group.frames for group in made.groups()] == [WAITS]


def test_ranks_without_stacks_are_kept_with_the_reason():
    made = tree(dump(0), dump(1, error="gone"), dump(4, error="gone"), dump(2, error="forbidden"))
    assert made.unread == {"gone": RankSet([1, 4]), "forbidden": RankSet([2])}
    assert str(made.ranks) == "0-2,4"


def test_what_was_seen_of_a_rank_is_kept_when_a_later_dump_fails():
    made = tree(dump(0, EVALUATES), dump(0), dump(0, error="gone"))
    assert [group.frames for group in made.groups()] == [WAITS]
    assert made.unread == {}


STACKS = st.sampled_from(
    [WAITS, EVALUATES, path("module"), path("module", "main"), path("reduce"), ()]
)
DUMPS = st.lists(
    st.tuples(STACKS, st.lists(STACKS, max_size=2), st.sampled_from(["", "", "gone"])), max_size=12
).map(
    lambda ranks: [
        dump(rank, main, *(ThreadStack("x-1", frames) for frames in others), error=error)
        for rank, (main, others, error) in enumerate(ranks)
    ]
)


@given(DUMPS, st.randoms())
def test_trees_of_nodes_merge_in_any_order_into_the_tree_of_the_job(dumps, random):
    whole = StackTree.from_stacks(dumps)
    shuffled = random.sample(dumps, len(dumps))
    cuts = sorted(random.choices(range(len(dumps) + 1), k=2))
    parts = [shuffled[: cuts[0]], shuffled[cuts[0] : cuts[1]], shuffled[cuts[1] :]]
    trees = [StackTree.from_stacks(part) for part in parts]
    assert merge(trees) == whole
    assert merge([merge(trees[:2]), trees[2]]) == whole
    assert merge(trees).groups() == whole.groups()


@given(DUMPS)
def test_groups_and_partings_account_for_every_rank(dumps):
    made = StackTree.from_stacks(dumps)
    seen = [rank for group in made.groups() for rank in group.ranks]
    assert sorted(seen) == [stacks.rank for stacks in dumps if not stacks.error]
    here = made.root().ranks
    for parting in parted(made):
        branches = [rank for branch in parting.branches for rank in branch.ranks]
        assert len(parting.branches) > 1
        assert len(branches) == len(set(branches))
        assert here >= set(branches)
        here = parting.branches[0].ranks
        for group in made.groups():
            passes = group.frames[len(group.frames) - len(parting.common) :] == parting.common
            assert passes == (set(group.ranks) <= set(branches))
