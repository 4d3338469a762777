from distdiag.checks.shd.untrained_parameter import UntrainedParameter
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.models import UntrainedView
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings


def untrained(*never, parted=None):
    """What rank 0, 1, … never had a gradient for; `parted` are the ranks that always had one."""
    by_rank = dict(enumerate(never))
    sites = {rank: plain_site(40 + rank) for rank in by_rank}
    having = {name: RankSet(ranks) for name, ranks in (parted or {}).items()}
    return UntrainedView("AdamW of DDP Net", by_rank, having, 3, sites)


def test_what_one_rank_trains_and_another_never_is_a_warning():
    view = untrained((), ("tower.weight",), parted={"tower.weight": [0]})
    (finding,) = findings(UntrainedParameter, view)
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert (finding.ranks, finding.subjects) == (RankSet([1]), ("tower.weight",))
    assert "never had a gradient on rank 1 and always on rank 0" in finding.message
    assert finding.location.line == 41


def test_what_nobody_trains_is_a_note():
    names = ("tower.weight", "tower.bias")
    (finding,) = findings(UntrainedParameter, untrained(names, names))
    assert (finding.severity, finding.grade) == (Severity.INFO, Grade.NOTE)
    assert (finding.ranks, finding.subjects) == (RankSet([0, 1]), names)
    assert (
        "tower.weight and 1 more of AdamW of DDP Net had no gradient at any of the 3 sampled steps"
        in (finding.message)
    )


def test_ranks_that_differ_where_copies_are_not_known_are_a_note():
    (finding,) = findings(UntrainedParameter, untrained((), ("tower.weight",)))
    assert (finding.grade, finding.ranks) == (Grade.NOTE, RankSet([1]))


def test_both_kinds_are_reported_apart():
    view = untrained(("a",), ("a", "b"), parted={"b": [0]})
    warning, note = findings(UntrainedParameter, view)
    assert (warning.subjects, note.subjects) == (("b",), ("a",))


def test_an_optimizer_all_of_whose_parameters_train_is_silent():
    assert not findings(UntrainedParameter, untrained((), ()))
