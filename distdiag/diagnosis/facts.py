"""All that rules may look at."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from distdiag.diagnosis.causes import Evidence
from distdiag.diagnosis.curves import BLOWN_UP, NOT_LEARNING, SICK, Measured
from distdiag.diagnosis.documents import Document, Documents, short_of
from distdiag.diagnosis.program import Program, read_program
from distdiag.diagnosis.settings import Settings
from distdiag.metrics.judging import Kind
from distdiag.metrics.series import Floats

RUN: Final = ("error_messages", "training_logs")
"""The artifacts in which a program speaks, the shorter first."""

ENOUGH_VALUES: Final = 20
"""Shorter curves contradict nobody; the judge of curves says no more than notes of them, too."""
FALLEN: Final = 0.9
"""A loss that is this far below is so by more than the noise of a tenth of its values."""

_NOT: Final = r"(?<!no )(?<!not )(?<!without )(?<!n't )(?<!never )"
WORDS: Final = {
    "nan": rf"{_NOT}\b(?:nan|nans|inf|infinity|infinite|not finite|non-finite)\b",
    "diverges": rf"{_NOT}\b(?:diverge[sd]?|diverging|divergence|blows? up|blew up|explod\w{{1,5}}"
    r"|explosion|loss (?:spikes?|goes up|increases|rises|shoots up|jumps))\b",
    "stuck": r"\b(?:plateaus?|plateaued|stuck|flat|constant|no learning"
    r"|does(?:n't| not) (?:learn|decrease|improve|go down|move|drop|change)"
    r"|not (?:learning|decreasing|improving|changing)"
    r"|never (?:improves|decreases|changes|drops))\b",
    "collapse": rf"{_NOT}\b(?:collaps\w{{1,4}}|same (?:token|word|output|class|answer)|one token|"
    r"single token|repeats?|repeating|repetitive|degenerate)\b",
    "overfits": rf"{_NOT}\b(?:overfit\w{{0,4}}"
    r"|(?:val|validation|eval) loss (?:rises|increases|goes up|grows))\b",
}
"""What people write of a run, by what they mean."""


@dataclass
class Facts:
    """The artifacts as rules see them; what is costly is done when a rule first asks."""

    documents: Documents
    symptoms: Sequence[str]
    measured: Measured

    @cached_property
    def program(self) -> Program:
        """The model's code."""
        return read_program(self.documents.of("model_code"))

    @cached_property
    def settings(self) -> Settings:
        """The values of the configuration and of the code."""
        modules = [(code.document, code.module) for code in self.program.codes]
        return Settings(self.documents.of("config"), modules)

    def lines(self) -> Iterator[tuple[Document, int, str]]:
        """Yield the lines in which the program speaks: of errors, then of logs."""
        for artifact in RUN:
            for document in self.documents.of(artifact):
                for number, line in document.numbered():
                    yield document, number, line

    def said(self, meaning: str) -> tuple[Evidence, ...]:
        """Return the first symptom with a meaning, as evidence, unless curves contradict it."""
        if meaning in ("nan", "diverges", "stuck") and self.falls:
            return ()
        pattern = re.compile(WORDS[meaning])
        for place, symptom in enumerate(self.symptoms, 1):
            if pattern.search(symptom[:2_000].lower()):
                return (Evidence(artifact="symptoms", line=place, quote=short_of(symptom)),)
        return ()

    @cached_property
    def falls(self) -> bool:
        """Whether a loss was measured, falls, and nothing is wrong with any curve."""
        found = [s.values for _, s in self.measured.series("loss") if len(s) >= ENOUGH_VALUES]
        if not found or self.measured.seen(*SICK):
            return False
        return all(_end(values) < FALLEN * _begin(values) for values in found)

    def uses_context(self, vocabulary: float) -> bool:
        """Whether a loss is below what a model reaches that knows how often each token comes.

        That is the entropy of tokens under Zipf's law, ln(V) / 2 + ln(ln(V)) in nats: 7.8 for a
        vocabulary of 50,000.
        """
        found = [s.values for _, s in self.measured.series("loss") if len(s) >= ENOUGH_VALUES]
        by_frequency = math.log(vocabulary) / 2 + math.log(math.log(vocabulary))
        return bool(found) and all(_end(values) < FALLEN * by_frequency for values in found)

    @property
    def blows_up(self) -> tuple[Evidence, ...]:
        """What was measured of a loss, or gradients, that grow without end."""
        return self.measured.of_kinds(*BLOWN_UP)

    @property
    def stands_still(self) -> tuple[Evidence, ...]:
        """What was measured of a loss that does not fall."""
        return self.measured.of_kinds(*NOT_LEARNING)

    @property
    def is_nan(self) -> tuple[Evidence, ...]:
        """Where a loss or gradient is first not finite: measured, or in a line of the run."""
        measured = self.measured.of_kinds(Kind.NOT_FINITE)
        return measured or self.first_line(NAN_LINE)

    def first_line(self, pattern: re.Pattern[str]) -> tuple[Evidence, ...]:
        """Return the first line of the run that a pattern fits."""
        for document, number, line in self.lines():
            if pattern.search(line):
                return (spoken(document, number, line),)
        return ()


def _begin(values: Floats) -> float:
    return float(np.nanmedian(values[: max(len(values) // 10, 3)]))


def _end(values: Floats) -> float:
    return float(np.nanmedian(values[-max(len(values) // 10, 3) :]))


NAN_LINE: Final = re.compile(
    r"(?i:\b(?:loss|grad(?:ient)?(?:[ _]norm)?)\b[\"']?\s{0,3}(?:is|was|became|=|:|)\s{0,3}[\"']?)"
    r"(?:nan|NaN|inf|Inf|Infinity)\b"
)


def spoken(document: Document, number: int, line: str) -> Evidence:
    """Return a line of a log as evidence."""
    return Evidence(
        artifact=document.artifact, source=document.name, line=number, quote=short_of(line)
    )
