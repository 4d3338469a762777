"""Shows views to the checks that name their types, and keeps what they find."""

from collections.abc import Iterable
from typing import Any

from distdiag.checks.base import Check
from distdiag.checks.dia.crashed_check import Crash, CrashedCheck
from distdiag.engine.creations import Creations
from distdiag.events.base import Event
from distdiag.findings.finding import Finding, Severity
from distdiag.findings.store import FindingStore
from distdiag.record.exception_text import LONGEST_TRACEBACK, message_of, traceback_of
from distdiag.views.base import View


class CheckRunner:
    """The checks of a run. A check that raises is switched off; `disabled` says why, by code."""

    def __init__(self, checks: Iterable[Check[Any]], creations: Creations) -> None:
        """Show views to these checks; `creations` says where what they name was made."""
        self._creations = creations
        self.checks = tuple(checks)
        self.disabled: dict[str, str] = {}
        self.store = FindingStore(
            {check.code: check.covers for check in self.checks},
            explains={check.code: check.explains for check in self.checks},
            gives_way={check.code for check in self.checks if check.gives_way},
        )
        self._by_view: dict[type, tuple[Check[Any], ...]] = {}

    def judging(self, kind: type[View | Event]) -> tuple[Check[Any], ...]:
        """Return the checks that judge views of this type and still run."""
        known = self._by_view.get(kind)
        if known is None:
            known = self._by_view[kind] = tuple(
                check
                for check in self.checks
                if kind in check.views and check.code not in self.disabled
            )
        return known

    def show(self, view: View | Event) -> bool:
        """Let the checks judge a view; return whether one found something of warning or above."""
        is_alarm = False
        for check in self.judging(type(view)):
            found = self._ask(check, view)
            is_alarm |= any(finding.severity is not Severity.INFO for finding in found)
            subject = view.supersedes if isinstance(view, View) else None
            if subject is not None:
                self.store.revise((check.code, type(view), subject), found)
                continue
            for finding in found:
                self.store.add(finding)
        return is_alarm

    def _ask(self, check: Check[Any], view: View | Event) -> list[Finding]:
        try:
            return [self._creations.complete(each, view) for each in check.check(view)]
        except Exception as error:  # noqa: BLE001 (a check must not end the report)
            self._by_view.clear()
            self.disabled[check.code] = self.report_crash(f"check {check.code}", error)
            return []

    def report_crash(self, part: str, error: Exception) -> str:
        """Tell that a part of the engine raised this; return why it does not look any more."""
        crash = Crash(part, error, traceback_of(error, error.__traceback__, LONGEST_TRACEBACK))
        for finding in CrashedCheck().check(crash):
            self.store.add(finding)
        return f"the {part.split()[0]} crashed: {type(error).__name__}: {message_of(error)}"
