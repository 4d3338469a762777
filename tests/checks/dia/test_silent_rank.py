import pytest

from distdiag.checks.dia.silent_rank import SilentRank
from distdiag.events.collectives import GroupCreated
from distdiag.events.lifecycle import RankStarted
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.rank_states import LaunchView, RankStatus
from tests.checks.streams import Job, event_of, plain_site
from tests.checks.verdicts import findings


def judged(job):
    return findings(SilentRank, job.view())


def test_ranks_without_any_event_are_named_at_the_end():
    job = Job(4)
    job.set(0, 1, status=RankStatus.FINISHED)
    job.set(2, 3, status=RankStatus.SILENT)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([2, 3])


def test_nothing_is_said_while_ranks_run():
    job = Job()
    job.set(1, status=RankStatus.SILENT)
    assert not judged(job)


def test_ranks_that_were_heard_of_are_silent():
    job = Job()
    job.set(0, 1, status=RankStatus.FINISHED)
    assert not judged(job)


def started(world=1):
    fields = {"local_rank": 0, "hostname": "", "pid": 1, "python": "3.11", "unix_ns": 0}
    return event_of(RankStarted, world_size=world, command=("train.py", "--lr", "1 2"), **fields)


def begun(scope, backend="cpu:gloo"):
    fields = {"api": "init_process_group", "ordinal": 0, "desc": "default_pg", "generation": 1}
    fields |= {"scope": scope, "ranks": scope, "backend": backend}
    return event_of(GroupCreated, site=plain_site(7), **fields)


def reported(event, num_ranks=1, world=1):
    job = Job(num_ranks)
    job.set(0, started=started(world))
    return findings(SilentRank, LaunchView(event, job.view().states))


def test_a_group_of_more_ranks_than_are_observed_is_a_note_with_the_command_to_use():
    (finding,) = reported(begun((0, 1, 2)))
    assert (finding.severity, finding.ranks) == (Severity.INFO, RankSet([1, 2]))
    command = "torchrun --nproc-per-node 3 -m distdiag.check train.py --lr '1 2'"
    assert finding.message == (
        f"ranks 1-2 of 3 are not observed; let torchrun start all ranks: {command}"
    )
    assert finding.fix.endswith(command)
    assert finding.evidence[0].location.line == 7


def test_ranks_that_a_launcher_should_have_started_get_no_command():
    (finding,) = reported(begun((0, 1, 2, 3)), num_ranks=2, world=2)
    assert finding.message == "ranks 2-3 of 4 are not observed"
    assert finding.fix == SilentRank.fix


@pytest.mark.parametrize(
    "event",
    [
        begun((0,)),
        begun((0, 1), backend="cpu:fake,cuda:fake"),
        begun((0, 1), backend=""),  # the end of a group
    ],
)
def test_a_group_behind_which_nobody_else_stands_is_no_reason(event):
    assert not reported(event)


def test_a_group_of_the_observed_ranks_is_no_reason():
    assert not reported(begun((0, 1)), num_ranks=2, world=2)
