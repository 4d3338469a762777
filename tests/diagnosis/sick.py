"""What a sick context is: artifacts with one fault, and what must be said of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sick:
    """Artifacts, the issue that must be a cause, and what quotations of its evidence must hold."""

    issue: str
    artifacts: dict[str, object]
    quotes: tuple[str, ...]
    symptoms: tuple[str, ...] = ()
    at_least: float = 0.5
    beside: tuple[str, ...] = ()
    """Other issues that may be causes, too: of faults that the same lines show."""

    @property
    def context(self) -> dict[str, object]:
        return {"artifacts": self.artifacts, "symptoms": list(self.symptoms)}
