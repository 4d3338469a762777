"""From a context to a diagnosis."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from distdiag.diagnosis.bounded import Failed, Step, run_steps
from distdiag.diagnosis.causes import Cause, Clue, Weighed, weigh
from distdiag.diagnosis.context import Context
from distdiag.diagnosis.curves import Measured, documents_with_curves, measure
from distdiag.diagnosis.documents import Documents, collect, short_of
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.result import Diagnosis, LookedAt, Missing, Status
from distdiag.diagnosis.rules import Rule, load_rules

_LATE: Final = ("source_checks", "dead_job")
"""What takes longest comes last, so that it is what a short time leaves out."""
_SUBJECTS: Final = {
    "curve_shapes": "what the curves tell",
    "dead_job": "what distdiag analyze finds in the logs",
    "gradient_flow": "where gradients flow",
    "labels": "the labels",
    "learning_rate": "the learning rate",
    "loss_functions": "the loss functions",
    "messages": "what the program said",
    "numerics": "operations that give NaN",
    "precision": "half precision",
    "sizes": "sizes of model, batch and vocabulary",
    "source_checks": "what distdiag lint finds in the code",
    "training_loop": "the training loop",
}
_WHY_WANTED: Final = {
    "training_logs": "they show at which step it began, and what the program said before",
    "loss_curves": "loss, gradient norm and learning rate of each step show where training leaves"
    " its course",
    "model_code": "most mistakes stand in the training loop, the loss, or how labels are made",
    "error_messages": "the whole traceback, or the warnings, name what failed and where",
    "config": "learning rate, warm-up, clipping, precision, batch size and sizes of the model",
}
MOST_IDEAS: Final = 5
_SAYS_SOMETHING: Final = ("training_logs", "loss_curves", "error_messages")


def diagnose(context: Context) -> Diagnosis:
    """Look at all artifacts of a context within its time, and weigh what they say.

    Nothing of what is given is imported, executed or changed.
    """
    deadline_s = time.monotonic() + context.limit_s
    with tempfile.TemporaryDirectory(prefix="distdiag-") as scratch:
        documents = collect(context, Path(scratch))
        left_out: list[str] = []
        measured = _measured(documents, deadline_s, left_out)
        facts = Facts(documents, context.symptoms, measured)
        clues = _clues(facts, deadline_s, left_out)
    return _Answer(context, facts, weigh(clues), tuple(left_out)).diagnosis()


def _measured(documents: Documents, deadline_s: float, left_out: list[str]) -> Measured:
    step = Step("reading curves", partial(measure, documents))
    for _, answer in run_steps([step], deadline_s):
        if isinstance(answer, Measured):
            return answer
        left_out.append(f"reading curves: {_why(answer)}")
    return Measured()


def _clues(facts: Facts, deadline_s: float, left_out: list[str]) -> list[Clue]:
    rules = load_rules()
    names = sorted(
        rules, key=lambda name: (name in _LATE, _LATE.index(name) if name in _LATE else 0)
    )
    steps = [Step(_SUBJECTS.get(n, n), partial(_look, rules[n], facts)) for n in names]
    found: list[Clue] = []
    for step, answer in run_steps(steps, deadline_s):
        if isinstance(answer, list):
            found += answer
        else:
            left_out.append(f"{step.what}: {_why(answer)}")
    return found


def _look(rules: Iterable[Rule], facts: Facts) -> list[Clue]:
    return [clue for rule in rules for clue in rule(facts)]


def _why(answer: object) -> str:
    return answer.why if isinstance(answer, Failed) else "it gave nothing"


class _Answer:
    """Puts the answer together."""

    def __init__(
        self, context: Context, facts: Facts, weighed: Sequence[Weighed], left_out: tuple[str, ...]
    ) -> None:
        self._context = context
        self._facts = facts
        self._causes = [each for each in weighed if each.is_cause]
        self._ideas = [each for each in weighed if not each.is_cause][:MOST_IDEAS]
        self._left_out = left_out

    def diagnosis(self) -> Diagnosis:
        status = self._status()
        return Diagnosis(
            status=status,
            summary=self._summary(status),
            root_causes=tuple(self._quoted(each.cause) for each in self._causes),
            possible=tuple(self._quoted(each.cause) for each in self._ideas),
            quick_fixes=tuple(dict.fromkeys(e.issue.quick for e in self._causes if e.issue.quick)),
            missing_artifacts=tuple(self._missing(status)),
            analysis_artifacts=tuple(self._looked_at()),
            left_out=self._left_out,
            warnings=self._context.warnings,
        )

    def _quoted(self, cause: Cause) -> Cause:
        """Return a cause whose evidence quotes the lines of logs that a value was read from."""
        lines = {
            (document.name, number): line
            for document in self._facts.documents.of("training_logs", "loss_curves")
            for number, line in document.numbered()
            if any(e.line == number and e.source == document.name for e in cause.evidence)
        }
        return msgspec.structs.replace(
            cause,
            evidence=tuple(
                msgspec.structs.replace(e, quote=short_of(lines[e.source, e.line]))
                if e.line and (e.source, e.line) in lines
                else e
                for e in cause.evidence
            ),
        )

    @property
    def _given(self) -> set[str]:
        documents = self._facts.documents
        read = {document.artifact for document in documents.all}
        return read | {item.artifact for item in documents.data if self._facts.measured.curves}

    def _status(self) -> Status:
        if self._causes:
            return "diagnosed"
        given = self._given
        says_something = any(artifact in given for artifact in _SAYS_SOMETHING)
        is_wrong = bool(self._context.symptoms or self._ideas)
        explains = {"model_code", "config"} <= given
        if not given or not says_something or (is_wrong and not explains):
            return "insufficient"
        return "inconclusive"

    def _summary(self, status: Status) -> str:
        if status == "diagnosed":
            first = self._causes[0].cause
            more = len(self._causes) - 1
            others = f", and {more} more" if more else ""
            return f"{first.issue} (confidence {first.confidence:.2f}){others}"
        if status == "insufficient":
            return (
                "the artifacts are not enough to name a cause: missing_artifacts says what to bring"
            )
        if self._ideas:
            return "nothing is sure enough to be called a cause; possible lists what fits"
        return "nothing wrong was found in these artifacts"

    def _missing(self, status: Status) -> list[Missing]:
        """Return what was not given: what the findings ask for, else all that helps."""
        given = self._given
        wanted: dict[str, list[str]] = {}
        for each in (*self._causes, *self._ideas):
            for artifact, why in each.issue.wants:
                if artifact not in given:
                    wanted.setdefault(artifact, []).append(why)
        for artifact, why in _WHY_WANTED.items():
            if artifact not in given and status != "diagnosed":
                wanted.setdefault(artifact, [why])
        return [
            Missing(artifact=artifact, why="; ".join(dict.fromkeys(wanted[artifact])))
            for artifact in _WHY_WANTED
            if artifact in wanted
        ]

    def _looked_at(self) -> list[LookedAt]:
        documents = self._facts.documents
        curves = documents_with_curves(self._facts.measured, documents.all)
        codes = {id(code.document) for code in self._facts.program.codes}
        found = []
        for document in documents.all:
            used = []
            if document.name in curves:
                used.append("curves")
            if id(document) in codes:
                used.append("code")
            elif document.pieces:
                used.append("text")
            problem = self._problem(document.name, bool(document.pieces))
            found.append(
                LookedAt(
                    artifact=document.artifact,
                    source=document.name,
                    num_lines=document.num_lines,
                    used=tuple(used),
                    problem=problem,
                )
            )
        for item in documents.data:
            has_curves = any(c.format == "inline" for c in self._facts.measured.curves)
            found.append(
                LookedAt(
                    artifact=item.artifact,
                    source=item.name or "loss_curves (inline)",
                    used=("curves",) if has_curves else (),
                    problem="" if has_curves else "it holds no numbers",
                )
            )
        found += [
            LookedAt(artifact=artifact, source=text.partition(": ")[0], problem=text)
            for artifact, text in documents.problems
        ]
        return found

    def _problem(self, name: str, is_text: bool) -> str:
        for problem in self._facts.program.problems:
            if problem.startswith(f"{name}: "):
                return problem.removeprefix(f"{name}: ")
        return "" if is_text else "it is no text"
