"""Stacks of running ranks: taken, sent as JSON, and put together over nodes."""

import subprocess
import sys

import msgspec
import pytest

from distdiag.events.base import Frame
from distdiag.events.errors import DamagedFileError
from distdiag.events.stacks import ThreadStack
from distdiag.live.job_dump import NodeDump, RankStacks, jobs_of, read_node_dump, take_dump
from distdiag.live.ranks import LiveRank
from distdiag.views.stack_tree import MAIN

WAITS = (ThreadStack(MAIN, (Frame("train.py", 57, "main"),)),)


def who(rank, *, job="node0:29500", world_size=4, hostname="node0", pid=1):
    return LiveRank(
        job=job, rank=rank, local_rank=rank, world_size=world_size, hostname=hostname, pid=pid
    )


def stacks(rank, *, error="", **about):
    return RankStacks(who=who(rank, **about), threads=() if error else WAITS, error=error)


def node(*ranks, hostname="node0"):
    return NodeDump(hostname=hostname, ranks=ranks)


@pytest.fixture
def process():
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_the_stacks_of_the_ranks_of_each_job_are_taken(process):
    said = []
    ranks = [who(0, pid=process.pid), who(0, job="node0:29501", pid=process.pid)]
    dump = take_dump(ranks, timeout_s=60, say=said.append)
    assert [(r.who.job, r.error) for r in dump.ranks] == [(rank.job, "") for rank in ranks]
    assert {r.threads[0].frames[-1].function for r in dump.ranks} == {"<module>"}
    assert said == [f"job {rank.job}: taking the stacks of rank 0 of 4" for rank in ranks]


def test_a_rank_that_dies_during_the_dump_costs_only_its_own_stacks(process):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as dying:

        def kill(_):
            dying.kill()
            dying.wait()

        ranks = [who(0, pid=process.pid), who(1, pid=dying.pid)]
        dump = take_dump(ranks, timeout_s=60, say=kill)
    assert [r.error for r in dump.ranks] == ["", "the process is gone"]


def test_a_dump_is_found_among_what_a_shell_wrote():
    dump = node(stacks(0), stacks(1, error="gone"))
    line = dump.to_json()
    assert b"\n" not in line
    assert read_node_dump(b"Welcome!\n{not a dump}\n" + line + b"\nBye\n") == dump


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (b"", "the answer holds no dump"),
        (b"Welcome!\n", "the answer holds no dump"),
        (b'{"distdiag_dump":1,"hostname":', "the dump is damaged"),
        (b'{"distdiag_dump":1,"hostname":"a","ranks":[{}]}', "missing required field `who`"),
        (b'{"distdiag_dump":1,"hostname":"a","ranks":' + b"[" * 9999, "the dump is damaged"),
        (b'{"distdiag_dump":2,"hostname":"a","ranks":[]}', "the dump has version 2, not 1"),
        (node(stacks(4)).to_json(), "it has a rank that cannot be"),
        (node(stacks(-1)).to_json(), "it has a rank that cannot be"),
        (node(stacks(0, world_size=1 << 40)).to_json(), "it has a rank that cannot be"),
    ],
)
def test_what_is_no_dump_is_refused(output, problem):
    with pytest.raises(DamagedFileError, match=problem):
        read_node_dump(output)


def test_ranks_of_several_nodes_are_put_together_job_by_job():
    other = stacks(0, job="node0:29501", world_size=1)
    second = node(stacks(3, hostname="node1"), stacks(2, hostname="node1"), hostname="node1")
    first_job, second_job = jobs_of([second, node(stacks(0), other)])
    assert (first_job.job, list(first_job.ranks)) == ("node0:29500", [0, 2, 3])
    assert (first_job.world_size, str(first_job.absent)) == (4, "1")
    assert first_job.hosts == ("node0", "node1")
    assert (second_job.job, second_job.ranks) == ("node0:29501", {0: other})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_a_rank_that_two_hosts_have_the_readable_one_counts(order):
    nodes = [node(stacks(0, error="gone")), node(stacks(0, hostname="node1"), hostname="node1")]
    (job,) = jobs_of([nodes[place] for place in order])
    assert (job.ranks[0].who.hostname, str(job.repeated)) == ("node1", "0")


def test_the_tree_of_a_job_has_all_its_ranks():
    (job,) = jobs_of([node(stacks(0), stacks(1), stacks(2, error="gone"))])
    ((group,), unread) = job.tree().groups(), job.tree().unread
    assert (str(group.ranks), {why: str(ranks) for why, ranks in unread.items()}) == (
        "0-1",
        {"gone": "2"},
    )


def test_the_form_on_the_wire_is_what_the_documentation_says():
    threads = (ThreadStack(MAIN, (Frame("train.py", 41, "evaluate"),)),)
    plain = msgspec.json.decode(node(RankStacks(who=who(0), threads=threads)).to_json())
    (rank,) = plain["ranks"]
    assert rank["threads"] == [[MAIN, [["train.py", 41, "evaluate", True]], False, False]]
    assert (rank["who"]["job"], rank["who"]["rank"], rank["error"]) == ("node0:29500", 0, "")
