"""An aligner that raises is switched off and said to be; the rest of the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NoReturn

import pytest

from distdiag.checks import load_checks
from distdiag.engine.aligner import Aligner, find_aligners
from distdiag.engine.hangs.aligner import CallAligner
from distdiag.engine.models.aligner import ModelAligner
from distdiag.events.base import Event
from distdiag.events.lifecycle import Finished
from distdiag.findings.finding import Finding, Severity
from distdiag.views.base import View
from tests.engine.stream import Job

ALIGNERS = sorted(find_aligners(), key=lambda kind: kind.__name__)


class Unspeakable(Exception):
    """Its message cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError


def fail(*_: object) -> NoReturn:
    raise KeyError("ours")


def fail_later(*_: object) -> Iterator[View]:
    yield from ()
    raise KeyError("ours")


def crashes(job: Job) -> list[Finding]:
    return [finding for finding in job.engine.findings if finding.code == "DIA001"]


def judging(kind: type[Aligner]) -> set[str]:
    """Return the codes of the checks that judge what this aligner shows."""
    checks = load_checks().items()
    return {code for code, check in checks if set(check.views) & set(kind.builds)}


@pytest.mark.parametrize(
    ("moment", "raising"),
    [*product(["feed", "tick", "end"], [fail, fail_later]), ("gaps", fail)],
)
@pytest.mark.parametrize("kind", ALIGNERS, ids=lambda kind: kind.__name__)
def test_whichever_fails_is_reported_once_with_all_that_is_not_seen(
    kind: type[Aligner], moment: str, raising: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moment == "feed":
        monkeypatch.setattr(kind, "needs", (Finished,))
    monkeypatch.setattr(kind, moment, raising)
    job = Job()
    job.passes(1)
    job.finishes(0)
    job.finishes(1)
    job.passes(1)
    job.engine.finish()
    reasons = job.engine.not_checked

    (finding,) = crashes(job)
    assert finding.severity is Severity.WARNING
    assert (
        finding.message == f"aligner {kind.__name__} failed and was switched off: KeyError: 'ours'"
    )
    assert "in fail" in finding.evidence[0].values["traceback"]
    assert {reasons.get(code) for code in judging(kind)} == {
        "the aligner crashed: KeyError: 'ours'"
    }


def test_the_others_go_on_and_what_was_found_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(hang_timeout_s=5.0)
    asked: list[Event] = []

    def feed(_: Aligner, event: Event) -> Iterator[View]:
        asked.append(event)
        raise Unspeakable

    monkeypatch.setattr(ModelAligner, "needs", (Finished,))
    monkeypatch.setattr(ModelAligner, "feed", feed)
    job.finishes(0)
    job.call(1, line=14, waited=False)
    job.finishes(0)
    job.passes(8)

    assert len(asked) == 1
    assert "COL001" in job.codes
    (finding,) = crashes(job)
    assert "Unspeakable: (its message cannot be shown" in finding.message


def test_without_the_aligner_of_calls_nobody_is_said_to_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(hang_timeout_s=5.0)
    job.everyone(line=10)
    job.call(0, line=14, waited=False)
    job.passes(8)
    assert job.engine.is_hung
    monkeypatch.setattr(CallAligner, "tick", fail)
    job.passes(8)

    assert not job.engine.is_hung
    assert not job.engine.evidence_wanted
    assert job.engine.states()[0].rank == 0
    assert "COL001" in job.codes
    job.engine.finish()
    assert len(crashes(job)) == 1
