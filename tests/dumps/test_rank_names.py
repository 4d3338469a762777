"""Ranks in the names of files."""

import pytest

from distdiag.dumps.ranks import ranks_from_names


def named(*paths):
    found = ranks_from_names(paths)
    return [found[path].rank if path in found else None for path in paths]


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("rank3", 3),
        ("rank-3.txt", 3),
        ("rank_03.json", 3),
        ("dumps/nccl_trace_rank_12", 12),
        ("comm_lib_trace_rank_7", 7),
        ("RANK=5.log", 5),
        ("dump.tar.gz!out/pyspy-rank2.txt", 2),
        ("rank4/stderr.log", 4),
        ("global_rank_11_local_rank_3.log", 11),
        ("node_rank_1/rank_9.log", 9),
        ("2024-05-01/job17_rank_2_of_8.log", 2),
        ("tp_rank_1.log", None),
        ("rank_1_rank_2.log", None),
        ("ranks.log", None),
        ("crank.log", None),
        ("train.log", None),
    ],
)
def test_the_word_is_trusted_in_a_single_file(path, rank):
    assert named(path) == [rank]


@pytest.mark.parametrize(
    ("path", "local_rank", "root"),
    [
        ("logs/none_ab1/attempt_0/3/stderr.log", 3, "logs/none_ab1"),
        ("attempt_1/0/error.json", 0, ""),
        ("a.zip!none_x/attempt_0/7/stdout.log", 7, "a.zip/none_x"),
        ("host1/local_rank_2.txt", 2, "host1"),
    ],
)
def test_a_rank_within_a_node_is_reported_as_such(path, local_rank, root):
    found = ranks_from_names([path])[path]
    assert (found.rank, found.local_rank, found.root) == (None, local_rank, root)


@pytest.mark.parametrize(
    "paths",
    [
        ["0.log", "1.log", "2.log"],
        ["trace_2", "trace_0", "trace_1"],
        ["a/dump_0.json", "a/dump_1.json"],
        ["run7/job-worker-0.txt", "run7/job-worker-1.txt", "run7/job-worker-3.txt"],
        ["20240501_2_0.txt", "20240501_2_1.txt"],
        ["x.tar!0/stderr", "x.tar!1/stderr"],
    ],
)
def test_numbers_that_count_from_0_are_ranks(paths):
    ranks = named(*paths)
    assert None not in ranks
    assert len(set(ranks)) == len(paths)
    assert min(ranks) == 0


@pytest.mark.parametrize(
    "paths",
    [
        ["3.log"],  # one file alone counts nothing
        ["gpu113.txt", "gpu117.txt"],  # names of hosts
        ["6301.txt", "6302.txt"],  # numbers of processes
        ["trace_1", "trace_2"],  # from 1: nodes, or attempts
        ["node0/trace_0", "node0/trace_1", "node1/trace_0", "node1/trace_1"],  # ranks of nodes
        ["node0.log", "node1.log"],
        ["step_0.txt", "step_1.txt"],
        ["0_1.txt", "1_0.txt"],  # two numbers that disagree
        ["0.log", "10.log"],  # too few of them
    ],
)
def test_other_numbers_are_no_ranks(paths):
    assert set(named(*paths)) == {None}


def test_families_do_not_disturb_each_other():
    paths = ["fr_0", "fr_1", "py/0.txt", "py/1.txt", "other.log"]
    assert named(*paths) == [0, 1, 0, 1, None]
