"""Which rank a dump is of, from all that is known of a set of files."""

from distdiag.dumps.ranks import resolve_ranks
from distdiag.dumps.reading import UNKNOWN_RANK, RankDump
from distdiag.events.stacks import Stacks


def dump(path, rank=None, *, local_rank=None, pid=None, source="py-spy-text"):
    event = Stacks(rank=UNKNOWN_RANK if rank is None else rank, seq=-1, time_ns=0, source=source)
    return RankDump(
        rank=rank, events=(event,), path=path, source=source, local_rank=local_rank, pid=pid
    )


def ranks(*dumps, told=None):
    resolved = resolve_ranks(dumps, told)
    for found in resolved.dumps:
        assert {event.rank for event in found.events} == {found.rank}
    return [(found.path, found.rank) for found in resolved.dumps], list(resolved.problems)


def test_content_comes_before_names():
    assert ranks(dump("rank3.txt", rank=5)) == ([("rank3.txt", 5)], [])


def test_names_tell_what_the_content_leaves_open():
    assert ranks(dump("a_0.txt"), dump("a_1.txt")) == ([("a_0.txt", 0), ("a_1.txt", 1)], [])


def test_the_user_is_asked_in_one_line():
    found, problems = ranks(*(dump(f"{name}.txt") for name in "abcde"), dump("rank1"))
    assert found == [("rank1", 1)]
    assert problems == [
        "a.txt, b.txt, c.txt and 2 more: neither content nor name tells the rank; "
        "say --rank FILE=RANK"
    ]


def test_what_the_user_says_is_taken_by_path_or_by_its_end():
    told = {"x/a.txt": 4, "b.txt": 2, "z.tar!c.txt": 6}
    found, problems = ranks(dump("x/a.txt"), dump("x/y/b.txt"), dump("z.tar!c.txt"), told=told)
    assert ([rank for _, rank in found], problems) == ([4, 2, 6], [])


def test_what_the_user_says_comes_before_names_but_not_before_content():
    told = {"rank3.txt": 7, "log": 7}
    assert ranks(dump("rank3.txt"), dump("log", rank=1), told=told)[0] == [
        ("rank3.txt", 7),
        ("log", 1),
    ]


def test_a_pid_that_the_launcher_named_tells_the_rank():
    known = dump("train.log", rank=6, local_rank=2, pid=77, source="torchelastic")
    assert ranks(known, dump("stuck.txt", pid=77))[0][1] == ("stuck.txt", 6)
    other_host = dump("train.log", rank=9, local_rank=1, pid=77, source="torchelastic")
    assert len(ranks(known, other_host, dump("stuck.txt", pid=77))[1]) == 1


def test_local_ranks_of_one_node_are_the_ranks():
    paths = [f"none_x/attempt_0/{n}/stderr.log" for n in (0, 1)]
    found = ranks(*map(dump, paths), dump("console.log", local_rank=1))
    assert found == ([(paths[0], 0), (paths[1], 1), ("console.log", 1)], [])


def test_one_known_rank_of_a_node_tells_the_others():
    found, problems = ranks(
        dump("none_x/attempt_0/0/stderr.log"),
        dump("none_x/attempt_0/1/stderr.log", rank=9),
        dump("none_y/attempt_0/1/stderr.log"),
        dump("none_y/attempt_0/0/stderr.log", rank=0),
    )
    assert ([rank for _, rank in found], problems) == ([8, 9, 1, 0], [])


def test_local_ranks_of_unknown_nodes_are_asked_for():
    found, problems = ranks(
        dump("none_x/attempt_0/0/stderr.log"), dump("none_y/attempt_0/0/stderr.log")
    )
    assert found == []
    assert len(problems) == 1


def test_the_same_name_in_two_folders_may_be_two_nodes():
    found, problems = ranks(dump("a/rank0.txt"), dump("b/rank0.txt"), dump("b/rank1.txt"))
    assert found == [("b/rank1.txt", 1)]
    assert problems == [
        "a/rank0.txt and b/rank0.txt both bear the name of rank 0: say --rank FILE=RANK, "
        "or analyze the folders one at a time"
    ]


def test_the_same_name_is_right_where_tools_differ_or_the_folder_is_the_same():
    found, problems = ranks(
        dump("a/rank0.txt"), dump("a/rank0-later.txt"), dump("b/rank0.txt", source="native-text")
    )
    assert ([rank for _, rank in found], problems) == ([0, 0, 0], [])


def test_a_log_of_several_ranks_gives_its_name_to_none_of_them():
    found, problems = ranks(dump("run_0.log", rank=1), dump("run_0.log"), dump("run_1.log"))
    assert found == [("run_0.log", 1)]
    assert problems[-1] == "run_0.log: some of it does not say its rank and is left out"


def test_a_file_that_names_its_own_rank_is_wholly_that_ranks():
    found, problems = ranks(dump("rank2.log", rank=2, source="traceback-text"), dump("rank2.log"))
    assert ([rank for _, rank in found], problems) == ([2, 2], [])
