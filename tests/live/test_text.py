"""How a dump reads at a terminal."""

from distdiag.events.base import Frame
from distdiag.events.stacks import ThreadStack
from distdiag.live.job_dump import RankStacks, jobs_of
from distdiag.live.text import MOST_GROUPS, job_text
from distdiag.views.stack_tree import MAIN
from tests.live.test_job_dump import node, stacks, who

MODULE = Frame("train.py", 90, "<module>")
TORCH = Frame("torch/distributed.py", 7, "all_reduce", user=False)
WAITS = (TORCH, Frame("train.py", 57, "main"), MODULE)
EVALUATES = (Frame("train.py", 12, "evaluate"), Frame("train.py", 41, "main"), MODULE)


def at(rank, frames, *others, world_size=4):
    threads = (ThreadStack(MAIN, frames), *others)
    return RankStacks(who=who(rank, world_size=world_size), threads=threads)


def text(*ranks, **options):
    (job,) = jobs_of([node(*ranks)])
    return job_text(job, **options)


def test_the_odd_rank_comes_first_with_the_users_line():
    assert text(*(at(rank, WAITS) for rank in (0, 1, 2)), at(3, EVALUATES)) == (
        "job node0:29500 on node0: 4 of 4 ranks, 2 distinct stacks\n"
        "  rank 3: train.py:12 in evaluate\n"
        "  ranks 0-2: train.py:57 in main\n"
        "      now in all_reduce (torch/distributed.py:7)\n"
        "  paths part below <module> (train.py:90):\n"
        "      ranks 0-2: main (train.py:57)\n"
        "      rank 3: main (train.py:41)\n"
    )


def test_the_text_of_the_line_is_shown_where_the_file_can_be_read(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(1)\n")
    shown = text(at(0, (Frame(str(script), 2, "<module>"),)))
    assert f"  rank 0: {script}:2 in <module>\n      time.sleep(1)\n" in shown


def test_ranks_that_could_not_be_seen_are_reported():
    shown = text(stacks(0, error="ptrace is forbidden"), stacks(2), stacks(2))
    assert "  rank 0: no stacks: ptrace is forbidden\n" in shown
    assert "  ranks 1,3: no process was found where this command looked\n" in shown
    assert "  rank 2: found more than once; one that could be read is shown\n" in shown


def test_other_threads_are_shown_when_asked_for():
    reader = ThreadStack("Thread-5 (read)", (Frame("data.py", 3, "read"),))
    assert "data.py" not in text(at(0, WAITS, reader))
    shown = text(at(0, WAITS, reader), all_threads=True)
    assert "  threads Thread-# (read)\n    rank 0: data.py:3 in read\n" in shown


def test_stacks_without_the_users_code_and_empty_ones_have_a_line():
    shown = text(at(0, (TORCH,)), at(1, ()))
    assert "  rank 0: no line of the user's code; now in all_reduce" in shown
    assert "  rank 1: no Python frame\n" in shown
    assert "paths part at the outermost frame:" in shown
    assert "goes no deeper" in shown


def test_of_many_groups_the_smallest_and_the_largest_are_shown():
    odd = [at(rank, (Frame("odd.py", rank, "f"), MODULE), world_size=99) for rank in range(50)]
    shown = text(*odd, *(at(rank, WAITS, world_size=99) for rank in range(50, 99)))
    lines = shown.splitlines()
    assert sum(" in f" in line for line in lines) == MOST_GROUPS - 1
    assert "  and 39 more groups of ranks, none larger than the last:" in lines
    assert "  ranks 50-98: train.py:57 in main" in lines
    assert len(lines) < 40


def test_names_of_strangers_cannot_steer_the_terminal_or_fill_it():
    shown = text(at(0, (Frame("\x1b[2J.py", 3, "f\nrank 9: x" + "y" * 10_000),)))
    assert "\x1b" not in shown
    assert "\\x1b[2J.py:3 in f\\nrank 9: x" in shown
    assert max(map(len, shown.splitlines())) <= 300
