"""How accesses that conflict are put together to races."""

from __future__ import annotations

import pytest

from distdiag.engine.files.races import FileRaces, PathIndex
from distdiag.events.ranks import RankSet
from tests.engine.traces import Trace


def test_a_rank_has_no_race_with_itself():
    trace = Trace()
    trace.write(0)
    trace.access(0, "read")
    assert trace.races == []


def test_who_has_made_the_folder_itself_does_not_need_the_other_one():
    trace = Trace()
    trace.access(0, "make-dir", "/d")
    trace.close(trace.access(1, "make-dir", "/d"), error="FileExistsError: /d")
    trace.access(1, "write", "/d/f")
    assert trace.races == []


def test_who_has_tested_the_folder_knows_what_to_do_without_it():
    trace = Trace()
    trace.access(1, "test", "/d", found=False)
    trace.access(1, "write", "/d/f")
    trace.access(0, "make-dir", "/d")
    assert trace.races == []


def test_who_makes_a_folder_makes_those_above_it_too():
    trace = Trace()
    trace.access(0, "make-dir", "/d")
    trace.close(trace.access(1, "make-dir", "/d/sub/sub"), error="FileNotFoundError: /d/sub")
    trace.access(1, "write", "/d/f")
    assert trace.races == []


def test_a_failure_is_kept_with_the_access():
    trace = Trace()
    trace.access(0, "rename", origin="/d/.f")
    trace.close(trace.access(1, "read"), error="FileNotFoundError: /d/f")
    (race,) = trace.races
    assert race.uses[1].closed.error == "FileNotFoundError: /d/f"


def test_a_write_is_over_when_it_is_closed_and_not_before():
    trace = Trace()
    write = trace.access(0, "write", has_end=True)
    trace.everyone()
    trace.access(1, "read")
    trace.close(write)
    trace.everyone()
    trace.access(1, "read", line=77)
    (race,) = trace.races
    assert race.uses[1].event.site.location.line != 77
    assert race.changes[0].closed is not None


def test_only_the_write_that_is_still_open_races():
    trace = Trace()
    long = trace.access(0, "write", line=1, has_end=True)
    trace.close(trace.access(0, "write", line=1, has_end=True))
    trace.everyone()
    trace.access(1, "read")
    trace.close(long)
    (race,) = trace.races
    assert race.changes[0].event is long


def test_a_read_that_takes_time_must_end_before_the_write_begins():
    trace = Trace()
    read = trace.access(1, "read", has_end=True)
    trace.everyone()
    trace.write(0)
    trace.close(read)
    assert trace.conflicts == ["read-of-write"]


# Races


def test_a_race_holds_all_ranks_and_paths_of_the_same_two_lines():
    trace = Trace(4)
    for path in ("/d/a", "/d/b"):
        trace.write(0, path, line=10)
        for rank in (1, 2, 3):
            trace.access(rank, "read", path, 20)
    (race,) = trace.races
    assert (set(race.changes), set(race.uses)) == ({0}, {1, 2, 3})
    assert race.paths == ("/d/a", "/d/b")
    assert race.ranks == RankSet(range(4))


def test_other_lines_make_another_race():
    trace = Trace()
    trace.write(0, line=10)
    trace.access(1, "read", line=20)
    trace.access(1, "read", line=21)
    assert len(trace.races) == 2


def test_of_two_writes_both_sides_hold_all_writers():
    trace = Trace(3)
    for rank in range(3):
        trace.write(rank, line=10)
    (race,) = trace.races
    assert set(race.changes) == set(race.uses) == {0, 1, 2}


def test_two_accesses_make_one_race_however_they_conflict():
    trace = Trace()
    for rank in (0, 1):
        trace.access(rank, "rename", "/d/f", 10, origin="/d/.f")
    assert trace.conflicts == ["two-writes"]


def test_who_reads_what_it_has_put_there_itself_races_only_as_a_writer():
    trace = Trace()
    for rank in (0, 1):
        trace.access(rank, "rename", "/d/f", 10, origin=f"/d/.{rank}")
        trace.access(rank, "read", "/d/f", 11)
    assert trace.conflicts == ["two-writes"]


def test_who_reads_what_another_one_replaces_later_races():
    trace = Trace()
    trace.access(1, "rename", "/d/f", origin="/d/.1")
    trace.everyone()
    trace.access(0, "rename", "/d/f", origin="/d/.0")
    trace.access(1, "read", "/d/f")
    assert trace.conflicts == ["read-of-write"]


@pytest.mark.parametrize(("change", "is_race"), [("rename", False), ("write", True)])
def test_who_has_seen_the_file_reads_it_whole_when_it_is_replaced_at_once(change, is_race):
    trace = Trace()
    trace.access(1, "test", found=True)
    trace.access(1, "read")
    trace.access(0, change)
    assert bool(trace.races) is is_race


def test_what_a_rank_has_moved_away_it_has_not_put_there():
    trace = Trace()
    trace.access(1, "rename", "/d/g", origin="/d/f")
    trace.access(1, "read", "/d/f")
    trace.access(0, "rename", "/d/f", origin="/d/.f")
    assert trace.conflicts == ["use-of-removed", "read-of-write"]


def test_a_race_is_shown_again_only_when_it_has_grown():
    trace = Trace(3)
    trace.write(0, line=10)
    trace.access(1, "read", line=20)
    trace.access(1, "read", "/d/other")
    races = trace.judged()
    assert [set(race.uses) for _, race in races.changed()] == [{1}]
    assert list(races.changed()) == []
    trace.access(2, "read", line=20)
    races.order.feed(trace.events[-1])
    assert [set(race.uses) for _, race in races.changed()] == [{1, 2}]


def test_an_access_is_not_judged_before_its_rank_has_gone_on():
    trace = Trace()
    trace.access(0, "write", "/d/lock", 10)
    trace.access(1, "write", "/d/lock", 10)
    races = FileRaces(trace.world)
    for event in trace.events:
        races.order.feed(event)
    assert list(races.changed()) == []
    for rank in (0, 1):
        trace.access(rank, "lock", "/d/lock")
        races.order.feed(trace.events[-1])
    races.finish()
    assert list(races.changed()) == []


def test_a_race_tells_the_last_wait_that_both_ranks_took_part_in():
    trace = Trace(3)
    trace.everyone()
    trace.everyone("all_reduce", ranks=(0, 1))
    trace.everyone(ranks=(1, 2))
    trace.write(0)
    trace.access(1, "read")
    (race,) = trace.races
    assert race.common_sync.signature.op == "all_reduce"
    assert race.uses[1].last_sync.group.ranks == (1, 2)


def test_a_race_has_struck_when_the_use_lies_within_the_change():
    def race(reads_inside):
        trace = Trace()
        write = trace.access(0, "write", has_end=True)
        if reads_inside:
            trace.access(1, "read")
        trace.close(write)
        if not reads_inside:
            trace.access(1, "read")
        return trace.races[0]

    assert race(True).has_struck
    assert not race(False).has_struck


@pytest.mark.parametrize(
    ("message", "line_of", "is_counted"),
    [("truncated", "read", True), ("cannot load /d/f", "other", True), ("no", "other", False)],
)
def test_the_exception_that_a_race_caused_is_part_of_it(message, line_of, is_counted):
    trace = Trace()
    trace.write(0)
    accesses = {"read": trace.access(1, "read"), "other": trace.access(1, "read", "/x")}
    trace.raises(1, accesses[line_of], message)
    races = trace.judged()
    races.note_end(trace.events[-1])
    (race,) = [race for _, race in races.changed()]
    assert list(race.raised) == [1] * is_counted


@pytest.mark.parametrize("is_used_first", [False, True])
def test_a_listing_is_followed_when_the_rank_uses_what_another_one_changed(is_used_first):
    trace = Trace()
    trace.access(1, "list", "/d")
    order = ["read", "write"] if is_used_first else ["write", "read"]
    for action in order:
        trace.access({"read": 1, "write": 0}[action], action, "/d/f")
    race = next(race for race in trace.races if race.conflict == "list-of-changed")
    assert race.uses[1].is_followed


def test_a_listing_whose_entries_nobody_uses_is_not_followed():
    trace = Trace()
    trace.access(1, "list", "/d")
    trace.write(0)
    trace.access(1, "read", "/d/own")
    (race,) = trace.races
    assert not race.uses[1].is_followed


def test_a_use_after_the_rank_has_waited_for_the_others_does_not_follow_the_listing():
    trace = Trace()
    trace.access(1, "list", "/d")
    trace.write(0)
    trace.everyone()
    trace.access(1, "read", "/d/f")
    (race,) = trace.races
    assert not race.uses[1].is_followed


def test_a_use_of_what_was_there_before_does_not_follow_the_listing():
    trace = Trace()
    trace.write(0, "/d/old")
    trace.everyone()
    trace.access(1, "list", "/d")
    trace.write(0, "/d/new")
    trace.access(1, "read", "/d/old")
    (race,) = trace.races
    assert not race.uses[1].is_followed


def test_the_listing_that_is_followed_is_the_last_one():
    trace = Trace()
    trace.access(1, "list", "/d", 50)
    trace.access(0, "rename", "/d/f", origin="/d/.f")
    last = trace.access(1, "list", "/d", 50)
    trace.access(1, "read")
    (race,) = [race for race in trace.races if race.conflict == "list-of-changed"]
    assert not race.uses[1].is_followed
    trace.events.remove(last)
    (race,) = [race for race in trace.races if race.conflict == "list-of-changed"]
    assert race.uses[1].is_followed


def test_an_access_before_the_group_exists_says_so():
    trace = Trace()
    trace.write(0)
    for done in (False, True):
        for rank in (0, 1):
            trace.creates(rank, done=done, backend="nccl")
    trace.access(1, "read")
    (race,) = trace.races
    assert (race.changes[0].is_before_init, race.uses[1].is_before_init) == (True, False)


# Which file it is


@pytest.mark.parametrize(
    ("hosts", "is_shared", "is_race"),
    [("aa", False, True), ("ab", False, False), ("ab", True, True)],
)
def test_a_path_is_one_file_on_one_host_or_where_it_is_shared(hosts, is_shared, is_race):
    trace = Trace()
    for rank in (0, 1):
        trace.starts(rank, hosts[rank])
    trace.access(0, "write", is_shared=is_shared)
    trace.access(1, "read", is_shared=is_shared)
    assert bool(trace.races) is is_race


def test_a_file_that_is_locked_does_not_race_itself():
    trace = Trace()
    for rank in (0, 1):
        trace.access(rank, "write", "/d/lock", 10)
        trace.access(rank, "lock", "/d/lock", 11)
        trace.access(rank, "unlock", "/d/lock", 12)
        trace.access(rank, "remove", "/d/lock", 13)
    assert trace.races == []


def test_a_creation_that_failed_has_changed_nothing():
    trace = Trace()
    write = trace.access(0, "write", has_end=True, is_exclusive=True)
    trace.close(write, error="FileExistsError: /d/f")
    trace.access(1, "read")
    assert trace.races == []


# What is forgotten of files, and in which order


def test_reads_are_forgotten_before_changes_and_that_is_said():
    trace, index = Trace(), PathIndex(most_accesses=2)
    trace.write(0, "/d/w")
    races = trace.judged()
    races._index = index
    for path in ("/d/w", "/d/a", "/d/b"):
        trace.access(0, "write" if path == "/d/w" else "read", path)
        races.order.feed(trace.events[-1])
    assert "forgotten" in races.problem
    assert index.at("/d/a") is None
    assert index.at("/d/w") is not None


def test_a_folder_is_forgotten_with_the_last_of_its_files():
    trace, index = Trace(), PathIndex(most_accesses=1)
    races = trace.judged()
    races._index = index
    for path in ("/d/sub/a", "/e/b"):
        trace.access(0, "read", path)
        races.order.feed(trace.events[-1])
    assert [path for path, _ in index.below("/d")] == []
    assert [path for path, _ in index.below("/e")] == ["/e/b"]
