from distdiag.checks.env.unconnected_ranks import UnconnectedRanks
from distdiag.events.lifecycle import SteppedAlone
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.streams import event_of, plain_site, together
from tests.checks.verdicts import findings

WORLD = RankSet([0, 1, 2])


def alone(rank, **values):
    fields = {"num_launched": 3, "library": "", "others": (), "site": plain_site(14 + rank)}
    return event_of(SteppedAlone, rank, seq=rank, **{**fields, **values})


def found(*ranks, **values):
    steps = [alone(rank, **values) for rank in ranks]
    return findings(UnconnectedRanks, together(*steps, expected=WORLD))


def test_ranks_that_all_step_without_a_group_are_one_finding():
    (finding,) = found(0, 1, 2)
    assert finding.ranks == WORLD
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert finding.location.line == 14
    assert finding.message == (
        "all 3 ranks train alone: WORLD_SIZE is 3 and no process group exists at the first "
        "optimizer step"
    )
    assert "--ignore ENV001" in finding.fix
    assert [each.ranks for each in finding.evidence] == [RankSet([rank]) for rank in WORLD]


def test_where_one_rank_never_steps_the_others_are_named():
    (finding,) = found(0, 2)
    assert finding.ranks == RankSet([0, 2])
    assert "ranks 0,2 train alone" in finding.message


def test_a_library_that_makes_a_group_and_uses_it_not_is_named():
    (finding,) = found(*WORLD, library="accelerate")
    assert "accelerate has set itself up for one process" in finding.message


def test_one_rank_that_trains_while_the_others_serve_it_is_silent():
    assert not found(1)


def test_a_package_that_may_connect_them_makes_it_a_note():
    (finding,) = found(*WORLD, others=("horovod",))
    assert finding.severity is Severity.INFO
    assert "horovod may connect them" in finding.message
