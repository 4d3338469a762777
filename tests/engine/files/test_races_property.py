"""The clocks against brute force: on random programs both must name the same accesses."""

from __future__ import annotations

import random
from itertools import combinations, takewhile

import pytest

from distdiag.engine.files.races import FileRaces
from distdiag.events.base import Event
from tests.engine.program_writer import Writer
from tests.engine.programs import Access, Program, TooManyStatesError
from tests.engine.sharing_programs import SharingWriter
from tests.engine.traces import Trace

FEW, MANY = 200, 10_000
FIRST_OF_MANY = 1_000_000


def touches(access: Access) -> set[str]:
    return {access.path, access.origin} - {""}


def is_at_or_below(paths: set[str], top: str) -> bool:
    return any(path == top or path.startswith(f"{top}/") for path in paths)


def is_gone(change: Access, use: Access) -> bool:
    """Whether what one rank uses is not there any more when another one was earlier."""
    if change.action not in ("remove", "remove-tree", "rename"):
        return False
    gone = change.origin or change.path
    is_listed = use.action == "list" and use.path == gone.rpartition("/")[0]
    return is_listed or is_at_or_below(touches(use), gone)


def spoils(change: Access, use: Access) -> bool:
    """Whether a change made at the wrong moment is bad for the use."""
    folder = change.path.rpartition("/")[0]
    if is_gone(change, use):
        return True
    if change.action == "make-dir":
        is_inside = is_at_or_below(touches(use) - {change.path}, change.path)
        return is_inside or (use.action == "list" and use.path in (change.path, folder))
    if change.action in ("write", "rename", "link"):
        if use.action == "list":
            return use.path == folder
        return use.path == change.path and use.action not in ("remove", "remove-tree", "make-dir")
    return change.action == "append" and use.action == "read" and use.path == change.path


def is_own(program: Program, change: Access, use: Access, unordered: set[frozenset[int]]) -> bool:
    """Whether a rank reads what it has put there itself, as another one does at any time."""
    index = program.accesses.index
    before = [
        step.access
        for step in takewhile(lambda s: s.access is not use, program.steps[use.rank])
        if step.access and step.access.action in ("rename", "link")
    ]
    return (use.action == "read" and change.action in ("rename", "link")) and any(
        own.path == change.path and frozenset((index(own), index(change))) in unordered
        for own in before
    )


def harms(program: Program, change: Access, use: Access, unordered: set[frozenset[int]]) -> bool:
    return spoils(change, use) and (
        is_gone(change, use) or not is_own(program, change, use, unordered)
    )


def expected(program: Program) -> set[frozenset[int]]:
    """The pairs of lines that can harm one another in some interleaving."""
    unordered = program.unordered()
    pairs = [[program.accesses[index] for index in pair] for pair in unordered]
    return {
        frozenset((one.line, other.line))
        for one, other in pairs
        if one.event and other.event
        if harms(program, one, other, unordered) or harms(program, other, one, unordered)
    }


def reported(trace: Trace, order: list[Event]) -> set[frozenset[int]]:
    races: FileRaces = trace.judged(order)
    return {frozenset((one[1], other[1])) for (_, one, other), _ in races.changed()}


def shuffled(trace: Trace, chance: random.Random) -> list[Event]:
    """The same events with those of each rank in their order, and the ranks mixed anew."""
    queues = [[e for e in trace.events if e.rank == rank] for rank in trace.world]
    turns = [rank for rank, queue in enumerate(queues) for _ in queue]
    chance.shuffle(turns)
    heads = [iter(queue) for queue in queues]
    return [next(heads[rank]) for rank in turns]


def compare(seed: int) -> bool:
    """Judge one program both ways; return whether it was small enough for that."""
    program, chance = Writer(seed).write(), random.Random(seed)
    trace = program.run(chance)
    try:
        should = expected(program)
    except TooManyStatesError:
        return False
    assert reported(trace, shuffled(trace, chance)) == should, f"seed {seed}"
    return True


def suspect(seed: int) -> bool:
    """Look for false alarms in one program with locks and polls; return whether it was small."""
    program, chance = SharingWriter(seed).write(), random.Random(seed)
    trace = program.run(chance)
    try:
        possible = program.can_meet()
    except TooManyStatesError:
        return False
    lines = {access.line for access in program.accesses}
    found = {pair for pair in reported(trace, shuffled(trace, chance)) if pair <= lines}
    assert found <= possible, f"seed {seed}"
    return True


def test_clocks_agree_with_all_interleavings():
    assert sum(compare(seed) for seed in range(FEW)) > 0.9 * FEW


def test_what_locks_and_polls_order_is_not_reported():
    assert sum(suspect(seed) for seed in range(FEW)) > 0.9 * FEW


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_clocks_agree_with_all_interleavings_of_many_programs():
    compared, seed = 0, FIRST_OF_MANY
    while compared < MANY:
        compared += compare(seed)
        seed += 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_locks_and_polls_order_is_not_reported_in_many_programs():
    assert sum(suspect(FIRST_OF_MANY + seed) for seed in range(MANY)) > 0.9 * MANY


def test_the_programs_hold_accesses_that_race_and_some_that_do_not():
    conflicts = races = 0
    for seed in range(50):
        program = Writer(seed).write()
        trace = program.run(random.Random(seed))
        races += len(reported(trace, trace.events))
        conflicts += sum(
            spoils(one, other) or spoils(other, one)
            for one, other in combinations(program.accesses, 2)
            if one.rank != other.rank
        )
    assert 20 < races < conflicts - 20
