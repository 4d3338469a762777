import random

import msgspec
import pytest

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Grade, Location, Severity
from distdiag.findings.store import FindingStore, folded
from tests.effort import is_linear

COVERS = {"SEQ007": ("PAR013", "SEQ007"), "PAR013": ()}


def finding(code="SEQ007", ranks=(0, 1), *, line=7, is_note=False, message="it"):
    return Finding(
        code=code,
        name="name",
        severity=Severity.INFO if is_note else Severity.WARNING,
        grade=Grade.NOTE if is_note else Grade.LIKELY,
        confidence=0.4 if is_note else 0.85,
        message=message,
        ranks=RankSet(ranks),
        evidence=(),
        location=Location("train.py", line, "main") if line else None,
    )


def test_a_note_supports_the_warning_about_the_same_loss():
    (found,) = folded([finding(is_note=True, message="the note"), finding(ranks=[0])], COVERS)
    assert found.severity is Severity.WARNING
    assert list(found.ranks) == [0]
    assert [each.summary for each in found.evidence] == ["the note"]


def test_groups_with_the_same_fault_are_one_finding():
    (found,) = folded([finding(), finding(ranks=[2, 3], message="theirs")], COVERS)
    assert list(found.ranks) == [0, 1, 2, 3]
    assert [each.summary for each in found.evidence] == ["theirs"]


@pytest.mark.parametrize("place", [0, 1])
def test_what_another_check_says_of_it_is_evidence(place):
    both = [finding()]
    both.insert(place, finding("PAR013", message="the weight"))
    (found,) = folded(both, COVERS)
    assert found.code == "SEQ007"
    assert [each.summary for each in found.evidence] == ["the weight"]


def test_a_note_covers_no_warning():
    found = folded([finding(is_note=True), finding("PAR013")], COVERS)
    assert [each.code for each in found] == ["SEQ007", "PAR013"]


@pytest.mark.parametrize("line", [8, None])
def test_other_lines_have_other_causes(line):
    assert len(folded([finding(), finding(ranks=[0], line=line)], COVERS)) == 2
    assert len(folded([finding(line=None), finding(ranks=[0], line=None)], COVERS)) == 2


def test_what_no_check_covers_stays_in_its_order():
    codes = ("PAR013", "SEQ005", "PAR013")
    found = folded([finding(code, [n]) for n, code in enumerate(codes)], COVERS)
    assert tuple(each.code for each in found) == codes


def test_the_surer_of_two_that_are_the_same_stands():
    conclusions = FindingStore(COVERS)
    conclusions.revise("by groups", [finding(is_note=True)])
    conclusions.revise("by targets", [finding(message="sure")])
    (found,) = conclusions.all()
    assert (found.message, found.evidence) == ("sure", ())


def placed(*findings):
    """What is left of these, where LOG001 gives way."""
    store = FindingStore({}, gives_way={"LOG001"})
    for each in findings:
        store.add(each)
    return {found.code: found for found in store.all()}


def error(code, grade=Grade.PROVEN):
    return msgspec.structs.replace(finding(code), severity=Severity.ERROR, grade=grade)


def test_what_gives_way_stands_where_nothing_is_proven():
    likely = error("LOG001", Grade.LIKELY)
    assert placed(likely) == {"LOG001": likely}
    assert placed(likely, error("HNG016", Grade.LIKELY))["LOG001"] == likely
    less = msgspec.structs.replace(error("DIA003"), severity=Severity.WARNING)
    assert placed(likely, less)["LOG001"] == likely


def test_what_gives_way_is_a_note_beside_what_is_proven():
    found = placed(error("LOG001", Grade.LIKELY), error("HNG001"))
    assert (found["LOG001"].severity, found["LOG001"].grade) == (Severity.INFO, Grade.NOTE)
    assert found["HNG001"].severity is Severity.ERROR


def test_a_note_that_gives_way_is_left_out_where_anything_is_wrong():
    note = finding("LOG001", is_note=True)
    assert placed(note) == {"LOG001": note}
    assert placed(note, finding("HNG016", is_note=True)).keys() == {"LOG001", "HNG016"}
    assert placed(note, finding("HNG016")).keys() == {"HNG016"}


def test_what_follows_on_the_same_ranks_is_evidence_of_its_cause_and_as_severe():
    cause = finding("REP004", message="the cause")
    effect = msgspec.structs.replace(finding("REP003", [1], line=9), severity=Severity.ERROR)
    (found,) = folded([effect, cause], {}, {"REP004": ("REP003",)})
    assert (found.code, found.severity) == ("REP004", Severity.ERROR)
    assert [each.location.line for each in found.evidence] == [9]


@pytest.mark.parametrize(
    "others",
    [
        [finding("REP004", is_note=True), finding("REP003")],
        [finding("REP004"), finding("REP003", is_note=True)],
        [finding("REP004", [0]), finding("REP003", [0, 1])],
    ],
    ids=["a note explains nothing", "a note stays", "other ranks"],
)
def test_what_need_not_follow_stays(others):
    assert len(folded(others, {}, {"REP004": ("REP003",)})) == 2


CHAINS = {"A": ("B", "C"), "B": ("A", "B", "D"), "C": ("A",), "D": ("B",)}
EXPLAINS = {"E": ("A", "B", "F"), "F": ("C",)}


def expected(found):
    """Return the place to which each belongs, by comparing each with all others."""

    def surer(place, mine):
        each = found[place]
        return each.severity.weight, each.confidence, each.code != mine.code, -place

    for place, mine in enumerate(found):
        causes = [
            other
            for other, each in enumerate(found)
            if mine.code in EXPLAINS.get(each.code, ())
            and Severity.INFO not in (mine.severity, each.severity)
            and mine.ranks <= each.ranks
        ]
        covers = [
            other
            for other, each in enumerate(found)
            if mine.code in CHAINS.get(each.code, ())
            and each.location == mine.location
            and each.location is not None
        ]
        yield causes[0] if causes else max((place, *covers), key=lambda at: surer(at, mine))


@pytest.mark.parametrize("seed", range(40))
def test_each_belongs_to_the_first_that_explains_it_or_the_surest_that_covers_it(seed):
    rng = random.Random(seed)
    found = [
        finding(
            rng.choice("ABCDEFG"),
            rng.sample(range(3), rng.randint(1, 3)),
            line=rng.choice((None, 1, 2)),
            is_note=rng.random() < 0.3,
            message=str(number),
        )
        for number in range(24)
    ]
    belongs = list(expected(found))
    kept = folded(found, CHAINS, EXPLAINS)
    assert [each.message for each in kept] == [str(place) for place in sorted(set(belongs))]
    for each in kept:
        others = [str(n) for n, at in enumerate(belongs) if str(at) == each.message != str(n)]
        assert [entry.summary for entry in each.evidence] == others


def test_folding_takes_as_long_as_there_are_findings():
    def fold(size):
        found = [finding("ABCDEF"[n % 6], [n % 8], line=n + 1) for n in range(size)]
        assert folded(found, CHAINS, EXPLAINS)

    assert is_linear(fold, 60)
