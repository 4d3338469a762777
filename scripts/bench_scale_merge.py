#!/usr/bin/env python
"""The part ``merge`` of ``scripts/bench_scale.py``: trees of stacks of many nodes become one.

Started by itself with a number of nodes, it prints the row for that size: a process of its own, so
that the peak of memory is that of one size.
"""

from __future__ import annotations

import random
import resource
import statistics
import subprocess
import sys
import time

from distdiag.events.base import Frame
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.views.stack_tree import (
    MAIN,
    Parting,
    Stack,
    StackGroup,
    StackTree,
    TreeDecoder,
    encode_tree,
    merge,
    parted,
)

NODES = 12_500
RANKS_PER_NODE = 8
NUM_STACKS = 100
DEPTH = 30
REPEATS = 7
HELPERS = ("pin_memory", "logger", "Thread-{} (_read_thread)")
COLUMNS = (
    "| nodes | ranks | groups | partings | median | largest | CPU | peak RSS | decoding | tree |"
)


def bench_merge(_: object) -> None:
    """Print the table of merging and judging for a quarter, a half and all of the nodes."""
    print(f"{COLUMNS}\n{'| --- ' * COLUMNS.count(' | ')}| --- |", flush=True)
    for num_nodes in (NODES // 4, NODES // 2, NODES):
        subprocess.run([sys.executable, __file__, str(num_nodes)], check=True)


def measure(num_nodes: int) -> None:
    """Print one row, and check that the verdict is the right one."""
    culprit = num_nodes * RANKS_PER_NODE * 2 // 3
    trees, wire_bytes, decoding_s = decoded_trees(num_nodes, culprit)
    durations: list[float] = []
    processor: list[float] = []
    for _ in range(REPEATS):
        started, used = time.perf_counter(), time.process_time()
        groups, partings, odd = judged(trees)
        durations.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert sum(len(group.ranks) for group in groups) == num_nodes * RANKS_PER_NODE
    assert len(groups) == NUM_STACKS
    assert [str(group.ranks) for group in groups if len(group.ranks) == 1] == [str(culprit)]
    assert len(odd) == num_nodes * RANKS_PER_NODE - len(groups[0].ranks)
    assert culprit in odd
    print(
        f"| {num_nodes:,} | {num_nodes * RANKS_PER_NODE:,} | {len(groups)} | {len(partings)} "
        f"| {statistics.median(durations):.2f} s | {max(durations):.2f} s "
        f"| {statistics.median(processor):.2f} s | {peak_mib:.0f} MiB "
        f"| {decoding_s:.2f} s | {wire_bytes / 1024:.1f} KiB |",
        flush=True,
    )


def judged(trees: list[StackTree]) -> tuple[tuple[StackGroup, ...], tuple[Parting, ...], RankSet]:
    """Merge the trees of all nodes, group the ranks, and find the odd ones and where they part."""
    tree = merge(trees)
    partings = parted(tree)
    return tree.groups(), partings, RankSet(r for parting in partings for r in parting.odd_ranks)


def decoded_trees(num_nodes: int, culprit: int) -> tuple[list[StackTree], float, float]:
    """Return the trees of all nodes, bytes of each on the wire, and seconds for decoding all."""
    generator = random.Random(0)
    stacks = distinct_stacks(generator)
    shares = [NUM_STACKS * 4.0] + [1.0] * (NUM_STACKS - 2)
    decoder = TreeDecoder()
    trees: list[StackTree] = []
    num_bytes, decoding_s = 0, 0.0
    for node in range(num_nodes):
        ranks = range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)
        mains = generator.choices(stacks[:-1], shares, k=RANKS_PER_NODE)
        mains = [stacks[-1] if r == culprit else m for r, m in zip(ranks, mains, strict=True)]
        dumps = [dump(r, main, stacks[0][-12:]) for r, main in zip(ranks, mains, strict=True)]
        wire = encode_tree(StackTree.from_stacks(dumps))
        num_bytes += len(wire)
        started = time.perf_counter()
        trees.append(decoder.decode(wire))
        decoding_s += time.perf_counter() - started
    return trees, num_bytes / num_nodes, decoding_s


def distinct_stacks(generator: random.Random) -> list[Stack]:
    """Return the stacks of a job, each of which shares the outer frames of another one."""
    numbers = iter(range(10, 1_000_000))
    paths = [[frame(next(numbers), user=True) for _ in range(DEPTH)]]
    while len(paths) < NUM_STACKS:
        shared = generator.choice(paths)
        cut = generator.randrange(8, min(26, len(shared)))
        rest = range(generator.randrange(DEPTH - 3, DEPTH + 4) - cut)
        paths.append(shared[:cut] + [frame(next(numbers), user=place < 4) for place in rest])
    return [tuple(reversed(path)) for path in paths]


def frame(number: int, *, user: bool) -> Frame:
    """Return a frame with names as long as they are in real stacks."""
    root = "/home/user/project/training" if user else "/opt/venv/lib/python3.11/site-packages/torch"
    return Frame(f"{root}/module_{number % 60}/part_{number % 7}.py", number, f"f_{number}", user)


def dump(rank: int, main: Stack, waiting: Stack) -> Stacks:
    """Return the stacks of one rank: the main thread and the usual helpers."""
    helpers = (ThreadStack(name.format(rank), waiting) for name in HELPERS)
    threads = (ThreadStack(MAIN, main), *helpers)
    return Stacks(rank=rank, seq=-1, time_ns=0, source="bench", threads=threads)


if __name__ == "__main__":
    measure(int(sys.argv[1]))
