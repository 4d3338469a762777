import pytest

from distdiag.checks.col.unmatched_send import UnmatchedSend
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.findings.source import location_of
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import RankStatus
from tests.checks.streams import Job, Program, plain_site, signature
from tests.checks.verdicts import findings, serious


def judged(job, call, trigger, expected=(0, 1)):
    alignment = job.message(call, expected=expected, trigger=trigger)
    return findings(UnmatchedSend, alignment)


def receive(job, rank=0, peer=1, **values):
    return job.call(rank, plain_site(10 + rank), sign=signature("recv", peer=peer, **values))


def test_a_receive_whose_sender_finished_names_the_sender():
    job = Job()
    call = receive(job)
    job.set(1, status=RankStatus.FINISHED)
    (finding,) = judged(job, call, Trigger.LEFT)
    assert (finding.ranks, finding.grade) == (RankSet([1]), Grade.PROVEN)
    assert "rank 0's recv from rank 1" in finding.message


def test_two_ranks_that_both_receive_first_are_one_finding():
    job = Job()
    calls = [receive(job, 0, 1), receive(job, 1, 0)]
    found = [judged(job, call, Trigger.CYCLE)[0] for call in calls]
    assert {f.identity for f in found} == {found[0].identity}
    assert found[0].ranks == RankSet([0, 1])


def test_a_send_that_waits_may_be_one_too_many_so_both_are_named():
    job = Job()
    call = job.call(0, sign=signature("send", peer=1))
    job.set(1, status=RankStatus.FINISHED)
    (finding,) = judged(job, call, Trigger.LEFT)
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.LIKELY)


def test_other_tags_are_pointed_out():
    job = Job()
    call = receive(job, 0, 1, tag=7)
    job.call(1, sign=signature("send", peer=0, tag=8))
    (finding,) = judged(job, call, Trigger.CYCLE)
    assert "the tags differ: 7 here, 8 there" in finding.message


@pytest.mark.parametrize("trigger", [Trigger.LEFT, Trigger.ENDED])
def test_a_message_that_nobody_waits_for_is_a_note(trigger):
    job = Job()
    call = job.call(0, sign=signature("send", peer=1), is_async=True)
    job.set(1, status=RankStatus.FINISHED)
    (finding,) = judged(job, call, trigger)
    assert finding.severity is Severity.INFO


def test_a_send_that_went_through_although_nobody_received_it_is_a_warning():
    job = Job()
    call = job.call(0, sign=signature("send", peer=1))
    job.set(0, 1, status=RankStatus.FINISHED)
    (finding,) = judged(job, call, Trigger.ENDED)
    assert finding.severity is Severity.WARNING


def test_a_peer_that_works_is_late_and_only_a_note():
    job = Job()
    call = receive(job)
    job.set(1, is_working=True)
    (finding,) = judged(job, call, Trigger.STALLED)
    assert finding.severity is Severity.INFO


def test_a_peer_that_raised_is_left_to_its_own_check():
    job = Job()
    call = receive(job)
    job.fail(1)
    assert not judged(job, call, Trigger.LEFT)
    found = serious(job.message(call, trigger=Trigger.LEFT))
    assert [f.code for f in found] == ["HNG001"]


def test_a_matched_pair_is_silent():
    job = Job()
    pair = job.message(receive(job), job.call(1, sign=signature("send", peer=0)))
    assert not serious(pair)


EARLY_RETURN = """
def gather():
    if not metrics:
        return
    dist.all_gather(parts, mine)

def main():
    gather()
    dist.recv(x, 0)
"""


def test_a_collective_that_the_receiver_left_out_is_named_with_its_condition(tmp_path):
    p = Program(tmp_path, EARLY_RETURN)
    job = Job()
    job.call(0, p.site("dist.all_gather", "    gather()"), "all_gather")
    call = job.call(1, p.site("dist.recv"), sign=signature("recv", peer=0))
    (finding,) = judged(job, call, Trigger.CYCLE)
    assert ", which rank 1 never called" in finding.message
    assert finding.location == location_of(p.frame("if not metrics"))
    assert finding.fix.startswith("Find out why `if not metrics:` (line 2) is decided differently")


def test_a_collective_that_the_receiver_left_out_without_a_condition_is_named(tmp_path):
    job = Job()
    job.call(0, plain_site(30), "all_gather")
    (finding,) = judged(job, receive(job, 1, 0), Trigger.CYCLE)
    assert finding.location.line == 30
    assert finding.fix.startswith("Let both ranks make the collective call")
