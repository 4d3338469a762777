"""What the engine concludes from whole runs, with the real checks."""

from __future__ import annotations

import random

import pytest

from distdiag.checks import load_checks
from distdiag.checks.shared.failures import SETTLED_S
from distdiag.engine import Engine
from distdiag.events.base import Phase
from distdiag.events.lifecycle import NodeLost, ProbeDisabled
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.findings.finding import Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.rank_states import RankStatus
from tests.engine.stream import Job, S


def test_a_correct_run_is_silent():
    job = Job(num_ranks=4)
    for _step in range(20):
        job.everyone(op="all_reduce", line=10)
        job.everyone(op="barrier", line=20, size=0)
        job.passes(1)
    for rank in range(4):
        job.finishes(rank)
    job.engine.finish()
    assert job.engine.findings == ()


def test_unlike_collectives_are_reported_when_the_second_record_arrives():
    job = Job()
    job.call(0, "barrier", 11)
    assert job.codes == []
    job.call(1, "all_reduce", 22)
    assert job.codes == ["COL002"]


def test_nothing_more_is_said_of_a_group_once_its_calls_are_paired_wrongly():
    job = Job()
    job.call(0, "barrier", 11)
    for _ in range(3):
        job.call(0, "broadcast", 12)
        job.call(1, "all_reduce", 22)
    assert len(job.alarms) == 1


def test_a_dtype_mismatch_is_reported_once_for_each_line():
    job = Job()
    for _ in range(5):
        job.call(0, line=10, dtype="float32")
        job.call(1, line=10, dtype="int32")
    assert job.codes == ["COL004"]


def test_the_minority_of_four_ranks_is_the_culprit_in_any_order_of_arrival():
    for seed in range(10):
        job = Job(num_ranks=4)
        order = list(range(4))
        random.Random(seed).shuffle(order)
        for rank in order:
            job.call(rank, line=10, size=5 if rank == 2 else 4)
        (finding,) = job.alarms
        assert (finding.code, finding.ranks) == ("COL003", RankSet({2}))


def test_a_rank_that_finished_is_missing_at_once():
    job = Job()
    job.everyone(line=10)
    job.call(1, line=12, waited=False)
    job.finishes(0)
    job.passes(0.5)
    (finding,) = job.alarms
    assert finding.code in {"COL001", "COL011"}
    assert finding.ranks == RankSet({0})


def test_a_missing_rank_is_reported_after_the_threshold_and_not_before():
    job = Job(hang_timeout_s=5)
    job.everyone(line=10)
    job.call(1, line=12, waited=False)
    job.passes(4)
    assert job.codes == []
    job.passes(3)
    (finding,) = job.alarms
    assert (finding.code, finding.ranks) == ("COL001", RankSet({0}))
    assert job.engine.is_hung


def test_a_rank_that_works_while_the_others_wait_is_not_a_hang():
    job = Job(hang_timeout_s=None)
    job.everyone(line=10)
    job.call(1, line=12, waited=False)
    job.passes(120, cpu={0: 0.9})
    assert job.codes == []
    assert not job.engine.is_hung


def test_without_a_threshold_of_the_user_half_a_minute_counts():
    job = Job(hang_timeout_s=None)
    job.everyone(line=10)
    job.call(1, line=12, waited=False)
    job.passes(28)
    assert job.codes == []
    job.passes(5)
    assert job.codes == ["COL001"]


def test_a_stall_that_ends_is_taken_back():
    job = Job(hang_timeout_s=5)
    job.everyone(line=10)
    job.call(1, line=12, waited=False)
    job.passes(8)
    assert job.engine.is_hung
    job.call(0, line=12)
    job.passes(1)
    assert job.codes == []
    assert not job.engine.is_hung
    assert [finding.code for finding in job.engine.findings] == ["COL001"]


def test_two_groups_in_opposite_order_are_a_cycle_long_before_the_threshold():
    job = Job(num_ranks=3, hang_timeout_s=None)
    job.everyone(line=10)
    job.call(0, line=20, group=(0, 1), waited=False)
    job.call(1, line=30, group=(0, 1, 2), waited=False)
    job.call(2, line=30, group=(0, 1, 2), waited=False)
    job.passes(3)
    assert len(job.alarms) == 1
    assert job.alarms[0].code.startswith("COL")


def test_asynchronous_calls_in_opposite_order_are_no_cycle():
    job = Job(hang_timeout_s=None)
    job.everyone(line=10)
    job.call(0, line=20, group=(0, 1), waited=False, is_async=True)
    job.call(1, line=30, waited=False, is_async=True)
    job.passes(3)
    assert job.codes == []


def test_the_exception_of_one_rank_is_the_cause_and_the_wait_of_the_other_is_not():
    job = Job()
    job.everyone(line=10)
    job.call(1, line=12, waited=False)
    job.raises(0, line=30)
    job.passes(1.0)
    (finding,) = job.alarms
    assert (finding.code, finding.ranks) == ("HNG001", RankSet({0}))
    assert finding.location is not None
    assert finding.location.line == 30


def test_a_rank_killed_by_the_launcher_after_the_first_failure_says_nothing():
    job = Job(num_ranks=3)
    job.everyone(line=10)
    job.call(1, line=12, waited=False)
    job.passes(0.5)
    job.raises(0, line=30)
    job.passes(0.5)
    job.dies(1)
    job.dies(2)
    job.passes(0.5)
    job.engine.finish()
    assert [(f.code, f.ranks) for f in job.alarms] == [("HNG001", RankSet({0}))]


def test_a_rank_that_died_is_named():
    job = Job()
    job.everyone(line=10)
    job.call(1, line=12, waited=False)
    job.dies(0)
    job.passes(SETTLED_S + 0.5)
    assert [(f.code, f.ranks) for f in job.alarms] == [("HNG002", RankSet({0}))]


def test_what_ranks_raise_alike_between_two_looks_is_one_finding():
    job = Job()
    job.everyone(line=10)
    job.raises(0, line=30)
    job.now_ns += 3 * S  # the stacks of the peer were taken meanwhile
    job.engine.tick(job.now_ns)
    job.raises(1, line=30)
    job.passes(2.0)
    (finding,) = job.engine.findings
    assert (finding.code, finding.ranks) == ("HNG001", RankSet({0, 1}))


def test_a_signal_that_is_seen_rank_by_rank_is_one_finding():
    job = Job()
    job.everyone(line=10)
    for rank in (0, 1):
        job.dies(rank, status=-15)
        job.now_ns += 3 * S
        job.engine.tick(job.now_ns)
    job.passes(2.0)
    (finding,) = job.engine.findings
    assert (finding.code, finding.ranks) == ("HNG002", RankSet({0, 1}))


def test_a_node_that_comes_back_was_not_lost():
    job = Job()
    job.everyone(line=10)
    job.engine.feed(NodeLost(rank=1, seq=-1, time_ns=job.now_ns, hostname="far", silent_s=20.0))
    assert job.engine.states()[1].lost is not None
    job.beat(1)
    assert job.engine.states()[1].lost is None


def test_sends_and_receives_match_by_peer_and_tag_in_any_order():
    job = Job()
    for tag in (3, 1, 2):
        job.call(0, "send", 40, peer=1, tag=tag)
    for tag in (1, 2, 3):
        job.call(1, "recv", 50, peer=0, tag=tag)
    job.finishes(0)
    job.finishes(1)
    job.engine.finish()
    assert job.codes == []


def test_a_send_that_nobody_receives_is_reported_at_the_end():
    job = Job()
    job.call(0, "send", 40, peer=1, tag=3)
    job.finishes(0)
    job.finishes(1)
    job.passes(0.5)
    job.engine.finish()
    assert job.codes == ["COL012"]


def test_a_receive_from_anywhere_takes_any_send():
    job = Job(num_ranks=3)
    job.call(0, "recv_any_source", 50)
    job.call(2, "send", 40, peer=0, tag=0)
    job.call(1, "send", 41, peer=0, tag=0)
    job.call(0, "recv_any_source", 50)
    job.engine.finish()
    assert job.codes == []


@pytest.mark.parametrize(("silence_s", "is_held"), [(2.0, False), (3.0, True)])
def test_a_rank_that_gave_no_sign_of_life_through_a_short_threshold_holds_its_gil(
    silence_s, is_held
):
    job = Job(2, hang_timeout_s=3.0)
    job.call(0, waited=False)
    job.beat(1)
    job.passes(silence_s)
    assert job.engine.states()[1].gil_held is is_held


def test_groups_built_in_another_order_are_reported():
    job = Job(num_ranks=4)
    for rank in range(4):
        first, second = ((0, 1), (2, 3)) if rank != 3 else ((2, 3), (0, 1))
        job.new_group(rank, first)
        job.new_group(rank, second)
    assert set(job.codes) == {"COL008"}
    assert job.alarms[0].ranks == RankSet({3})


def test_a_rank_out_of_sight_does_not_stand_still():
    job = Job(2, hang_timeout_s=5.0)
    job.call(0, waited=False)
    for _ in range(100):
        job.now_ns += 1_000_000_000
        job.engine.tick(job.now_ns, {1})
    assert job.engine.findings == ()
    assert not job.engine.states()[1].gil_held
    for _ in range(20):
        job.now_ns += 1_000_000_000
        job.engine.tick(job.now_ns)
    assert [list(finding.ranks) for finding in job.engine.findings] == [[1]]


def test_ranks_of_nodes_that_nobody_observes_are_not_missed():
    job = Job(num_ranks=2)
    for rank in range(2):
        job.call(rank, line=10, group=(0, 1, 2, 3))
        job.finishes(rank)
    job.passes(1)
    job.engine.finish()
    assert job.engine.findings == ()


@pytest.mark.parametrize("is_told_late", [False, True])
def test_a_rank_without_an_agent_is_neither_missed_nor_held_to_stand_still(is_told_late):
    job = Job(3)
    checks = [check() for check in load_checks().values()]
    job.engine = Engine(checks, RankSet(range(3)), hang_timeout_s=5.0)  # in which nobody has begun
    if is_told_late:
        for rank in (0, 1):
            job.new_group(rank, (0, 1, 2))
            job.call(rank, line=9)
    job.engine.feed(
        ProbeDisabled(rank=2, seq=-1, time_ns=job.now_ns, probe="agent", reason="no room")
    )
    job.call(0, line=10, size=4)
    job.call(1, line=10, size=5)
    for _ in range(40):  # both wait for rank 2
        job.now_ns += 1_000_000_000
        job.engine.tick(job.now_ns)
    job.engine.finish()
    assert not job.engine.is_hung
    loud = [f for f in job.engine.findings if f.severity is not Severity.INFO]
    # Those that are observed are compared with one another.
    assert [finding.code for finding in loud] == ["COL003"]
    assert all(2 not in finding.ranks for finding in loud)
    assert "no room" in job.engine.states()[2].incomplete


def test_an_exception_after_the_death_of_a_peer_is_not_the_cause():
    job = Job()
    job.everyone(line=10)
    job.dies(0)
    job.passes(0.5)
    job.raises(1, line=30)
    job.passes(0.5)
    job.dies(1)
    job.passes(2)
    job.engine.finish()
    assert [(f.code, f.ranks) for f in job.alarms] == [("HNG002", RankSet({0}))]


def test_a_rank_that_never_came_stays_silent_whatever_the_monitor_says_of_it():
    silent = Engine([], RankSet({0, 1}))
    silent.feed(Stacks(rank=1, seq=-1, time_ns=0, source="py-spy", error="no process"))
    assert silent.states()[1].status is RankStatus.SILENT


@pytest.mark.parametrize(("hang_timeout_s", "codes"), [(None, []), (30.0, ["HNG007"])])
def test_saving_may_take_longer_than_a_step_unless_the_user_set_the_threshold(
    hang_timeout_s, codes
):
    job = Job(hang_timeout_s=hang_timeout_s)
    job.everyone(line=10)
    job.beat(0, phase=Phase.CHECKPOINT)
    job.call(1, line=12, waited=False)
    job.passes(100)
    assert job.codes == codes


def test_a_stall_after_a_contradiction_adds_nothing():
    job = Job()
    job.call(0, "barrier", 11, waited=False)
    job.call(1, "all_reduce", 22, waited=False)
    job.passes(10)
    assert job.codes == ["COL002"]
    assert job.engine.is_hung


def test_a_circle_is_one_finding_also_after_the_threshold():
    job = Job()
    job.everyone(line=10)
    job.call(0, line=20, group=(1, 0), waited=False)
    job.call(1, line=30, group=(0, 1), waited=False)
    job.passes(10)
    assert job.codes == ["COL001"]
    assert job.engine.is_hung


def test_groups_built_differently_are_one_finding_even_if_the_job_then_stalls():
    job = Job()
    job.new_group(0, (0,))
    job.new_group(1, (0, 1))
    job.new_group(0, (0, 1))
    job.call(1, line=20, waited=False)
    job.passes(10)
    assert job.codes == ["COL008"]
    assert job.engine.is_hung


@pytest.mark.parametrize("code", sorted(load_checks().keys() - {"DIA001"}))
def test_no_check_can_end_the_report_by_raising(code, monkeypatch):
    def explode(self, view):
        raise ZeroDivisionError("boom")

    check = load_checks()[code]
    monkeypatch.setattr(check, "check", explode)
    monkeypatch.setattr(check, "views", (*check.views, CollectiveView))
    job = Job()
    job.call(0, line=10, dtype="float32")
    job.call(1, line=10, dtype="int32")
    job.finishes(0)
    job.finishes(1)
    job.passes(1)
    job.engine.finish()
    crashed = [f for f in job.engine.findings if f.code == "DIA001"]
    assert [finding.subjects for finding in crashed] == [(code,)]
    assert "ZeroDivisionError" in job.engine.not_checked[code]
    assert code not in job.engine.checked
    assert ("COL004" in job.codes) is (code != "COL004")


def test_ranks_that_are_all_in_one_collective_which_never_ends_are_reported_after_a_while():
    job = Job(hang_timeout_s=None)
    job.everyone(line=10)
    for rank in range(2):
        job.call(rank, line=12, waited=False)
    job.passes(100)
    assert job.codes == []
    job.passes(30)
    assert job.codes == ["HNG003"]
    assert job.alarms[0].ranks == RankSet({0, 1})
    assert job.engine.is_hung


def test_ranks_that_all_create_a_group_which_never_comes_are_reported_too():
    job = Job(hang_timeout_s=None)
    for rank in range(2):
        job.new_group(rank, (0, 1))
    job.passes(130)
    assert job.codes == ["HNG003"]


def test_who_ends_a_hanging_job_is_no_second_fault():
    job = Job()
    job.everyone(line=10)
    job.call(0, line=12, waited=False)
    job.passes(10)
    assert job.codes == ["COL001"]

    job.dies(0)
    job.dies(1)
    job.passes(1)

    assert job.codes == ["COL001"]
    died = [f for f in job.engine.findings if f.code == "HNG002"]
    assert [f.severity for f in died] == [Severity.INFO]


def test_opposite_order_that_does_not_block_the_host_is_one_circle_once_the_job_stalls():
    job = Job(4)
    job.everyone(line=9)
    job.call(0, line=10, group=(0, 1), is_async=True)
    job.call(1, line=11, group=(1, 0), is_async=True)
    job.passes(10)
    (finding,) = job.alarms
    assert (finding.code, finding.ranks) == ("COL001", RankSet([0, 1]))


def test_who_is_busy_after_a_contradiction_waits_for_a_gpu():
    job = Job()
    job.everyone(line=9)
    job.call(0, "all_reduce", 10)
    job.call(1, "broadcast", 11)
    job.passes(8, cpu={0: 1.0, 1: 1.0})
    assert all(state.stacks is not None for state in job.engine.states().values())


def test_a_group_that_one_rank_creates_alone_is_the_fault_and_not_the_call_of_the_other():
    job = Job()
    job.everyone(line=9)
    job.new_group(1, (0, 1), line=20)
    job.call(0, line=10, waited=False)
    job.passes(10)
    assert job.codes == ["COL008"]


def test_a_rank_may_go_on_alone_after_the_others_have_ended():
    job = Job(hang_timeout_s=30.0)
    job.everyone(line=9)
    job.finishes(1)
    job.dies(1)
    job.passes(20)
    assert job.codes == []


def test_a_lost_message_in_the_way_of_a_collective_is_said_of_the_message():
    job = Job(2)
    job.call(0, waited=False)
    job.call(1, "recv", 50, peer=0, waited=False)
    job.passes(3)
    assert job.codes == ["COL012"]
