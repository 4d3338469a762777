"""In which order ranks ended, from torchrun's word, times, places in files, or nothing."""

from distdiag.analysis.order import in_order
from distdiag.dumps.reading import RankDump
from distdiag.events.lifecycle import Exited, Raised
from distdiag.events.stacks import Observed


def raised(rank, place=0, *, path="train.log", time_ns=0):
    event = Raised(
        rank=rank, seq=-1, time_ns=time_ns, type="E", message="", frames=(), traceback=""
    )
    return RankDump(rank=rank, events=(event,), path=path, source="text", place=place)


def exited(rank, place=0, *, path="train.log", time_ns=0, is_first=False, status=1):
    values = {"is_first_failure": is_first, "exitcode": status}
    seen = Observed(rank=rank, seq=-1, time_ns=0, source="torchelastic", summary="", values=values)
    end = Exited(rank=rank, seq=-1, time_ns=time_ns, status=status)
    return RankDump(rank=rank, events=(seen, end), path=path, source="torchelastic", place=place)


def order(*dumps):
    """Return the ranks by the times of their ends; those of one time together."""
    times = {}
    for dump in in_order(dumps):
        for event in dump.events:
            if isinstance(event, Raised | Exited):
                times.setdefault(event.time_ns, set()).add(dump.rank)
    return [times[time_ns] for time_ns in sorted(times)]


def test_the_place_in_the_file_orders_what_has_no_time():
    assert order(raised(0, 900), raised(3, 100), raised(1, 500)) == [{3}, {1}, {0}]


def test_times_come_before_places():
    assert order(raised(0, 100, time_ns=9), raised(3, 900, time_ns=5)) == [{3}, {0}]


def test_the_root_cause_comes_before_both():
    assert order(raised(0, 1), raised(3, 9), exited(3, 20, is_first=True)) == [{3}, {0}]
    late = exited(3, 20, time_ns=9, is_first=True)
    assert order(raised(0, 1, time_ns=5), late) == [{3}, {0}]


def test_a_root_cause_that_was_told_to_end_is_none():
    assert order(raised(0, 1), exited(3, 20, is_first=True, status=-15)) == [{0}, {3}]


def test_first_failures_of_two_nodes_contradict_one_another():
    assert order(raised(1, 5), exited(0, 20, is_first=True), exited(3, 30, is_first=True)) == [
        {1},
        {0},
        {3},
    ]


def test_files_of_one_rank_each_tell_no_order():
    assert order(raised(0, 900, path="0.log"), raised(1, 100, path="1.log")) == [{0, 1}]


def test_other_dumps_are_left_alone():
    dump = RankDump(rank=1, events=(), path="x", source="y")
    assert in_order([dump]) == [dump]
