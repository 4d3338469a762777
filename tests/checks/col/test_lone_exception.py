from distdiag.checks.col.lone_exception import BrokenPassView, LoneException
from distdiag.events.lifecycle import BrokenPass
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings


def test_a_forward_pass_of_which_nothing_else_is_known_is_named_by_its_call():
    event = event_of(
        BrokenPass,
        1,
        step=5,
        what="forward pass",
        type="",
        message="",
        frames=(),
        site=plain_site(30),
    )
    (finding,) = findings(LoneException, BrokenPassView({1: event}, RankSet([0, 2])))
    assert finding.grade is Grade.NOTE
    assert finding.location.line == 30
    assert finding.message == (
        "rank 1 caught an exception that ended a forward pass in step 5, and went on; ranks 0,2 "
        "had none"
    )
