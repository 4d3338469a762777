"""Verdicts on flight-recorder dumps: the right rank, whatever the order of files and rings."""

import json
import os

import pytest

from distdiag.analysis import analyze
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Outcome, Severity
from tests.dumps.recorders import BEGIN_NS, SECOND, recorders, write_dumps


def judge(folder, ranks, **options):
    """Analyze the dumps of a job that had stood still for long when they were written."""
    write_dumps(folder, ranks)
    newest_ns = max(entry["time_created_ns"] for recorder in ranks for entry in recorder.entries)
    for path in folder.iterdir():
        os.utime(path, ns=(newest_ns + 900 * SECOND,) * 2)
    return analyze([folder], **options)


def bad(report):
    """Return (code, culprits) of what is worse than a note."""
    return [(f.code, str(f.ranks)) for f in report.findings if f.severity is not Severity.INFO]


def train(ranks, num_steps=3):
    for recorder in ranks:
        for step in range(num_steps):
            recorder.call("_all_gather_base", [(4,)], [(16,)], line=11)
            recorder.call(line=12)
            recorder.call("broadcast", line=13 + step % 2)
    return ranks


def hang(ranks):
    for recorder in ranks:
        recorder.call(line=20)
        recorder.pending()


@pytest.mark.parametrize("culprit", range(4))
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_rank_that_did_not_come_is_named(tmp_path, culprit, backend):
    ranks = train(recorders(4, backend=backend))
    hang([recorder for recorder in ranks if recorder.rank != culprit])
    report = judge(tmp_path / "dumps", ranks)
    assert bad(report) == [("COL001", str(culprit))]
    assert report.run.outcome is Outcome.HUNG
    assert f"rank {culprit} never called all_reduce #10" in report.findings[0].message


@pytest.mark.parametrize("culprit", range(4))
@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("COL002", {"op": "broadcast"}),
        ("COL003", {"sizes": [(5,)]}),
        ("COL004", {"input_dtypes": ["Half"]}),
    ],
)
def test_a_contradiction_is_decided_by_majority(tmp_path, culprit, code, wrong):
    ranks = train(recorders(4))
    for recorder in ranks:
        recorder.call(line=20, **(wrong if recorder.rank == culprit else {}))
        recorder.pending()
    assert bad(judge(tmp_path / "dumps", ranks)) == [(code, str(culprit))]


def test_a_contradiction_that_no_recorder_saw_fail_is_found_too(tmp_path):
    ranks = train(recorders(4))
    for recorder in ranks:
        recorder.call(line=20, input_dtypes=["Half" if recorder.rank == 1 else "Float"])
    train(ranks, 2)
    assert bad(judge(tmp_path / "dumps", ranks)) == [("COL004", "1")]


def test_two_groups_in_opposite_order_are_a_circle(tmp_path):
    ranks = recorders(2, backend="nccl")
    for recorder in ranks:
        recorder.group("1", "one", [0, 1])
        recorder.group("2", "two", [0, 1])
        recorder.call()
        recorder.call(group="21"[recorder.rank], line=20 + recorder.rank)
        recorder.pending()
    report = judge(tmp_path / "dumps", ranks)
    assert {code for code, _ in bad(report)} == {"COL001"}
    assert report.findings[0].ranks == RankSet([0, 1])


def test_a_receive_without_a_send_is_found(tmp_path):
    ranks = train(recorders(2))
    ranks[1].message("recv 1<-0", line=30, state="scheduled", retired=False)
    assert bad(judge(tmp_path / "dumps", ranks))[0][0] == "COL012"


def test_a_healthy_job_that_was_dumped_while_it_ran_has_no_finding(tmp_path):
    ranks = train(recorders(4), 5)
    hang(ranks[1:])  # rank 0 is about to come
    write_dumps(tmp_path, ranks)
    newest_ns = max(recorder.entries[-1]["time_created_ns"] for recorder in ranks)
    for path in tmp_path.iterdir():
        os.utime(path, ns=(newest_ns + SECOND // 2,) * 2)
    report = analyze([tmp_path])
    assert bad(report) == []
    assert report.run.outcome is Outcome.RUNNING


def test_dumps_that_were_taken_one_after_the_other_accuse_nobody(tmp_path):
    ranks = recorders(4)
    for recorder in ranks:
        train([recorder], 3 + recorder.rank)
    report = judge(tmp_path / "dumps", ranks)
    assert bad(report) == []
    assert "older than those of its peers" in report.not_checked["rank 0"]


def test_rings_that_begin_at_different_calls_accuse_nobody(tmp_path):
    ranks = recorders(4)
    for recorder in ranks:
        recorder.capacity = 20 + 7 * recorder.rank
    assert bad(judge(tmp_path / "dumps", train(ranks, 30))) == []


def test_uneven_sizes_that_are_legal_are_no_finding(tmp_path):
    ranks = recorders(4)
    for recorder in ranks:
        recorder.call("all_to_all", [(3 + recorder.rank,)], [(9 - recorder.rank,)])
        recorder.call("gather", [(4,)], [(4, 4)] if recorder.rank == 0 else [])
        recorder.call("scatter", [(4, 4)] if recorder.rank == 0 else [], [(4,)])
        recorder.call("_all_gather_base", [(4,)], [(16,)])
    assert bad(judge(tmp_path / "dumps", ranks)) == []


def test_ranks_without_a_dump_are_silent_and_not_accused(tmp_path):
    ranks = train(recorders(4))
    hang(ranks)
    report = judge(tmp_path / "dumps", ranks[:2])
    assert report.silent_ranks == RankSet([2, 3])
    assert report.not_checked["ranks 2-3"] == "nothing of them was found"
    assert [code for code, _ in bad(report)] in ([], ["HNG003"])
    assert report.run.world_size == 4


def test_what_a_recorder_leaves_out_is_not_said_to_be_checked(tmp_path):
    report = judge(tmp_path / "dumps", train(recorders(2)))
    assert {"COL005", "COL006", "COL008"} <= report.not_checked.keys()
    assert not {"COL005", "COL006", "COL008"} & set(report.checked)
    assert {"COL001", "COL002", "COL003"} <= set(report.checked)


def test_the_newest_dump_of_a_rank_counts(tmp_path):
    early, late = recorders(2), train(recorders(2), 4)
    write_dumps(tmp_path, train(early, 2), name="early_rank_")
    for recorder in late:
        (tmp_path / f"late_rank_{recorder.rank}.json").write_bytes(recorder.json())
    report = analyze([tmp_path])
    assert bad(report) == []
    assert "#12" in report.run.ranks[0].last


def test_a_line_that_is_given_by_hand_tells_the_rank(tmp_path):
    ranks = train(recorders(2))
    hang(ranks[:1])
    (tmp_path / "left.bin").write_bytes(ranks[0].pickle())
    (tmp_path / "right.bin").write_bytes(ranks[1].pickle())
    report = analyze([tmp_path], ranks_by_file={"left.bin": 0, "right.bin": 1})
    assert bad(report) == [("COL001", "1")]


def test_an_unknown_pause_is_not_reported_as_a_fact(tmp_path):
    ranks = train(recorders(2))
    hang(ranks[:1])
    write_dumps(tmp_path, ranks)
    for path in tmp_path.iterdir():
        os.utime(path, ns=(BEGIN_NS - SECOND,) * 2)  # by the clock of another machine
    report = analyze([tmp_path])
    assert bad(report) == [("COL001", "1")]
    assert "duration of the standstill" in report.not_checked


def test_a_call_that_timed_out_tells_how_long_it_had_waited(tmp_path):
    ranks = train(recorders(2))
    for recorder in ranks:
        recorder.call(state="started", retired=True, timeout_ms=1_800_000)
    report = judge(tmp_path / "dumps", ranks)
    (finding,) = [finding for finding in report.findings if finding.code == "HNG016"]
    assert "for 180" in finding.message
    assert finding.grade is Grade.LIKELY


def test_stacks_of_another_tool_tell_where_the_missing_rank_is(tmp_path):
    ranks = train(recorders(3))
    hang(ranks[:2])
    folder = tmp_path / "dumps"
    write_dumps(folder, ranks)
    frame = {"name": "read_shard", "filename": "/home/user/data.py", "line": 71}
    thread = {"pid": 9, "thread_id": 1, "thread_name": "MainThread", "frames": [frame]}
    (folder / "py_spy_rank_2.json").write_text(json.dumps([thread]))
    report = analyze([folder])
    (finding,) = [finding for finding in report.findings if "COL001" in finding.code]
    assert (str(finding.ranks), str(finding.location)) == ("2", "/home/user/data.py:71")


def test_ranks_that_all_wait_in_one_call_are_not_to_blame_for_what_others_queued_behind(tmp_path):
    ranks = train(recorders(4))
    hang(ranks)  # the same call, on all ranks
    for recorder in ranks[:3]:
        recorder.call(line=21)  # NCCL lets the host go on
        recorder.pending()
    report = judge(tmp_path / "dumps", ranks)
    assert bad(report) == [("HNG016", "")]
    assert "all_reduce #10" in report.findings[0].message
    assert report.findings[0].grade is Grade.LIKELY


def test_a_rank_without_a_dump_is_a_suspect_in_its_own_group_only(tmp_path):
    ranks = recorders(4)
    for recorder in ranks:
        members = [0, 2] if recorder.rank % 2 == 0 else [1, 3]
        recorder.group(str(1 + recorder.rank % 2), "dp", members)
        recorder.call(group=str(1 + recorder.rank % 2), line=5)
    for recorder in ranks[:2]:
        recorder.call(line=20)
        recorder.pending()
    ranks[3].call(line=20)
    ranks[3].pending()
    report = judge(tmp_path / "dumps", [r for r in ranks if r.rank != 2])
    assert bad(report) == [("COL001", "2")]
    assert "rank 2 left no record, while ranks 0-1,3 wait in all_reduce #1" in (
        report.findings[0].message
    )


def test_few_dumps_of_many_ranks_accuse_nobody(tmp_path):
    ranks = train(recorders(8))
    hang(ranks)
    assert bad(judge(tmp_path / "dumps", ranks[:2])) == []


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_contradiction_is_found_though_a_rank_left_no_dump(tmp_path, backend):
    ranks = train(recorders(4, backend=backend))
    for recorder in ranks[:2]:
        recorder.call(line=20)
        recorder.pending()
    ranks[3].call("broadcast", line=21)
    ranks[3].pending()
    report = judge(tmp_path / "dumps", [r for r in ranks if r.rank != 2])
    assert bad(report) == [("COL002", "3")]


def test_parts_of_a_batch_are_compared(tmp_path):
    ranks = train(recorders(3))
    for recorder in ranks:
        size = (9,) if recorder.rank == 1 else (8,)
        recorder.call("all_reduce", [(4,)], line=30)
        recorder.same_call("all_reduce", [size], line=30)
        recorder.same_call("coalesced", line=30)
        recorder.pending()
    assert bad(judge(tmp_path / "dumps", ranks)) == [("COL003", "1")]


def with_states(*states):
    """One recorder for each rank: a call that ended, and one in this state."""
    ranks = recorders(len(states))
    for recorder, state in zip(ranks, states, strict=True):
        recorder.call()
        recorder.call(state=state, retired=False)
    return ranks


def test_the_rank_whose_gpu_has_not_begun_the_call_keeps_the_others_waiting(tmp_path):
    ranks = with_states("started", "scheduled", "started", "started")
    (finding,) = analyze([write_dumps(tmp_path / "dumps", ranks)]).findings
    assert (finding.code, str(finding.ranks)) == ("HNG016", "1")
    assert "the GPU of rank 1 has not begun all_reduce #2" in finding.message
    assert "ranks 0,2-3 wait" in finding.message


@pytest.mark.parametrize("state", ["started", "scheduled"])
def test_where_all_gpus_are_as_far_as_one_another_nobody_is_named(tmp_path, state):
    (finding,) = analyze([write_dumps(tmp_path / "dumps", with_states(*[state] * 4))]).findings
    assert (finding.code, str(finding.ranks)) == ("HNG016", "")


def test_gpus_that_each_wait_in_a_call_that_the_other_has_not_begun(tmp_path):
    ranks = recorders(2)
    for recorder, order in zip(ranks, ("01", "10"), strict=True):
        recorder.group("1", "tp", range(2))
        for group, state in zip(order, ("started", "scheduled"), strict=True):
            recorder.call(group=group, state=state, retired=False)
    (finding,) = analyze([write_dumps(tmp_path / "dumps", ranks)]).findings
    assert (finding.code, str(finding.ranks)) == ("HNG016", "0-1")
    assert "GPUs wait for one another" in finding.message
    assert "in group tp" in finding.message and "in group default_pg" in finding.message


def test_a_call_that_one_rank_saw_end_is_no_sign_of_a_standstill(tmp_path):
    ranks = with_states("completed", "scheduled", "scheduled")
    assert analyze([write_dumps(tmp_path / "dumps", ranks)]).findings == ()
