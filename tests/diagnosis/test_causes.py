import pytest

from distdiag.diagnosis.causes import FITS, MOST, SAID, SHOWN, SPOKEN, Clue, Evidence, Issue, weigh
from distdiag.findings.finding import Severity

ISSUE = Issue(id="issue", title="something is wrong", severity=Severity.ERROR, fix="Mend it.")


def clue(weight, *artifacts, issue=ISSUE, says="", line=1):
    evidence = tuple(Evidence(artifact=each, line=line, quote="x") for each in artifacts)
    return Clue(issue, weight, evidence, says)


@pytest.mark.parametrize(
    ("clues", "confidence"),
    [
        ([clue(FITS, "training_logs")], 0.4),
        ([clue(FITS, "training_logs"), clue(SAID, "symptoms")], 0.52),
        ([clue(FITS, "loss_curves"), clue(FITS, "config")], 0.64),
        ([clue(SHOWN, "model_code")], 0.7),
        ([clue(SHOWN, "model_code"), clue(FITS, "loss_curves")], 0.82),
        ([clue(SPOKEN, "error_messages")], 0.9),
        ([clue(SPOKEN, "error_messages"), clue(FITS, "config")], 0.94),
        ([clue(SPOKEN, "error_messages"), clue(SHOWN, "model_code")], MOST),
    ],
)
def test_the_confidences_of_the_documentation(clues, confidence):
    (weighed,) = weigh(clues)

    assert weighed.cause.confidence == pytest.approx(confidence)
    assert weighed.is_cause == (confidence >= 0.5)


def test_a_log_its_curve_and_its_error_are_one_witness():
    clues = [clue(FITS, each) for each in ("training_logs", "loss_curves", "error_messages")]

    (weighed,) = weigh(clues)

    assert weighed.cause.confidence == 0.4


def test_one_clue_with_two_witnesses_counts_once():
    (weighed,) = weigh([clue(SHOWN, "model_code", "config")])

    assert weighed.cause.confidence == 0.7


def test_what_only_fits_is_no_cause_where_nothing_is_known_to_be_wrong():
    (weighed,) = weigh([clue(FITS, "model_code"), clue(FITS, "config")])

    assert weighed.cause.confidence == FITS
    assert not weighed.is_cause


def test_the_effect_of_a_cause_becomes_its_evidence():
    effect = Issue(id="effect", title="it shows", severity=Severity.ERROR, fix="Look.")
    cause = Issue(
        id="cause", title="why", severity=Severity.ERROR, fix="Mend.", explains=("effect",)
    )

    found = weigh(
        [clue(SHOWN, "model_code", issue=cause), clue(SHOWN, "training_logs", issue=effect, line=7)]
    )

    assert [each.issue.id for each in found] == ["cause"]
    assert found[0].cause.confidence == pytest.approx(0.82)
    assert ("training_logs", 7) in [(e.artifact, e.line) for e in found[0].cause.evidence]


def test_an_idea_explains_nothing():
    effect = Issue(id="effect", title="it shows", severity=Severity.ERROR, fix="Look.")
    idea = Issue(id="idea", title="why", severity=Severity.ERROR, fix="Mend.", explains=("effect",))

    found = weigh(
        [clue(FITS, "config", issue=idea), clue(SHOWN, "training_logs", issue=effect, line=7)]
    )

    assert [each.issue.id for each in found] == ["effect", "idea"]


def test_what_says_only_that_something_failed_gives_way_to_what_says_why():
    failed = Issue(id="f", title="it raised", severity=Severity.ERROR, fix="Look.", is_general=True)

    found = weigh(
        [
            clue(SPOKEN, "training_logs", issue=failed, line=3),
            clue(SHOWN, "training_logs", line=3),
        ]
    )
    elsewhere = weigh(
        [
            clue(SPOKEN, "training_logs", issue=failed, line=3),
            clue(SHOWN, "training_logs", line=9),
        ]
    )

    assert [each.issue.id for each in found] == ["issue"]
    assert {each.issue.id for each in elsewhere} == {"issue", "f"}


def test_a_clue_without_evidence_is_refused():
    with pytest.raises(AssertionError):
        Clue(ISSUE, SHOWN, ())
