"""Findings that say the same are said once, and nothing of them is lost."""

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Location, Severity
from distdiag.reports.folding import folded, said_once
from tests.reports.synthetic_run import make_finding


def of_rank(rank, **changes):
    evidence = (Evidence(ranks=RankSet({rank}), summary=f"pid {rank}"),)
    fields = {
        "message": f"probe files of rank {rank} was switched off",
        "ranks": RankSet({rank}),
        "evidence": evidence,
    }
    return make_finding(**(fields | changes))


def test_findings_that_differ_in_their_rank_only_become_one():
    (merged,) = said_once([of_rank(3), of_rank(30), of_rank(4)])
    assert merged.message == "probe files of ranks 3-4,30 was switched off"
    assert merged.ranks == RankSet({3, 4, 30})
    assert [entry.summary for entry in merged.evidence] == ["pid 3", "pid 30", "pid 4"]


def test_other_places_subjects_severities_and_texts_stay_apart():
    others = [
        of_rank(1),
        of_rank(2, location=None),
        of_rank(2, subjects=("other",)),
        of_rank(2, severity=Severity.WARNING),
        of_rank(2, message="probe hooks of rank 2 was switched off"),
        of_rank(2, code="DIA002"),
    ]
    assert said_once(others) == others


def test_a_rank_in_the_message_is_not_the_beginning_of_another():
    findings = [of_rank(rank, message=f"rank {rank} differs from rank 10") for rank in (1, 2)]
    (merged,) = said_once(findings)
    assert merged.message == "ranks 1-2 differs from rank 10"


def test_another_check_that_saw_the_same_line_and_subjects_is_folded():
    first, drift = of_rank(1), of_rank(1, code="REP003", message="they drift")
    elsewhere = of_rank(1, subjects=("other",))
    groups = folded([first, drift, elsewhere])
    assert [group.finding for group in groups] == [first, elsewhere]
    assert groups[0].also == (drift,)
    assert [group.is_repeated for group in groups] == [False, True]


def test_checks_of_one_family_that_show_the_same_place_and_file_are_folded():
    write, read = (Location("train.py", line, "main", "") for line in (51, 41))
    there = (Evidence(ranks=RankSet({1}), summary="writes it", location=write),)
    of_file = {"subjects": ("images.bin",)}
    writers = of_rank(1, code="BAR002", location=write, **of_file)
    race = of_rank(1, code="BAR001", location=read, evidence=there, **of_file)
    assert [group.finding for group in folded([writers, race])] == [writers]
    for other in (
        of_rank(1, code="BAR001", location=read, **of_file),  # it does not show the line
        of_rank(1, code="CKP008", location=read, evidence=there, **of_file),
        of_rank(1, code="BAR001", location=read, evidence=there, subjects=("labels.bin",)),
        of_rank(2, code="BAR001", location=read, evidence=there, **of_file),
    ):
        assert len(folded([writers, other])) == 2


def test_findings_without_a_line_are_never_folded():
    findings = [of_rank(1, location=None), of_rank(1, location=None, code="REP003")]
    assert [group.finding for group in folded(findings)] == findings
