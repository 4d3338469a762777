"""What parts of logs say together of how processes ended."""

from distdiag.dumps.ranks import resolve_ranks
from distdiag.dumps.reading import RankDump
from distdiag.events.lifecycle import Exited, Raised
from distdiag.events.stacks import Observed


def raised(rank=None, *, path="train.log", message="x", **rest):
    event = Raised(
        rank=-1, seq=-1, time_ns=0, type="ValueError", message=message, frames=(), traceback=""
    )
    return RankDump(rank=rank, events=(event,), path=path, source="text", **rest)


def exited(rank=None, status=1, *, path="train.log", cause="", is_first=False, **rest):
    values = {"is_first_failure": is_first}
    seen = Observed(rank=-1, seq=-1, time_ns=0, source="torchelastic", summary="", values=values)
    end = Exited(rank=-1, seq=-1, time_ns=0, status=status, cause=cause)
    return RankDump(rank=rank, events=(seen, end), path=path, source="launcher", **rest)


def found(*dumps):
    """Return who raised, and who ended with which status and cause, by rank or by name."""
    resolved = resolve_ranks(dumps)
    assert resolved.problems == ()
    return {
        (
            resolved.labels.get(dump.rank, dump.rank),
            "raised" if isinstance(event, Raised) else (event.status, event.cause),
        )
        for dump in resolved.dumps
        for event in dump.events
        if not isinstance(event, Observed)
    }


def test_an_unsigned_traceback_is_that_of_the_one_rank_that_failed():
    assert found(raised(), exited(2), exited(0, -15)) == {
        (2, "raised"),
        (2, (1, "")),
        (0, (-15, "")),
    }


def test_of_several_the_first_that_torchrun_saw():
    assert (2, "raised") in found(raised(), exited(2, is_first=True), exited(3))


def test_where_several_could_have_written_it_it_is_nobodys():
    assert ("a process in train.log", "raised") in found(raised(), exited(2), exited(3))


def test_a_rank_with_a_traceback_of_its_own_gets_no_other():
    both = found(raised(), raised(2, message="own"), exited(2))
    assert both == {("a process in train.log", "raised"), (2, "raised"), (2, (1, ""))}


def test_a_traceback_that_is_reported_twice_counts_once():
    assert found(raised(), raised(2)) == {(2, "raised")}


def test_a_status_of_a_local_rank_is_that_of_the_rank_of_its_node_that_raised():
    status = exited(local_rank=0, node="node1", label="node1 local rank 0")
    assert found(raised(2, label="node1"), status) == {(2, "raised"), (2, (1, ""))}
    assert ("node1 local rank 0", (1, "")) in found(raised(2, label="node0"), status)


def test_vague_words_count_only_where_nothing_else_is_known():
    vague = exited(is_vague=True)
    assert found(vague) == {("a process in train.log", (1, ""))}
    assert found(vague, exited(2)) == {(2, (1, ""))}


def test_memory_explains_what_sigkill_ended():
    kernel = exited(None, -9, cause="out-of-memory", is_vague=True)
    assert found(kernel, exited(2, -9), exited(0, -15)) == {
        (2, (-9, "out-of-memory")),
        (0, (-15, "")),
    }


def test_what_is_true_of_the_whole_job_is_said_of_every_rank():
    limit = exited(None, -15, cause="time-limit", label="job 47", is_whole_job=True)
    assert found(limit) == {("job 47", (-15, "time-limit"))}
    assert found(limit, exited(0, -15), exited(1, -15)) >= {
        (0, (-15, "time-limit")),
        (1, (-15, "time-limit")),
    }


def test_names_come_after_the_known_ranks():
    resolved = resolve_ranks([raised(4), raised(label="worker pid=7", message="other")])
    assert resolved.labels == {5: "worker pid=7"}
    assert [dump.rank for dump in resolved.dumps] == [4, 5]


def test_siblings_give_the_family_of_names():
    quiet = [f"slurm-47_{n}.out" for n in (0, 1, 3)]
    resolved = resolve_ranks([raised(path="slurm-47_2.out")], siblings=quiet)
    assert [dump.rank for dump in resolved.dumps] == [2]
