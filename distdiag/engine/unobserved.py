"""Knows what probes could not see although they work: attributes and objects that they lack."""

from __future__ import annotations

from typing import Any

from distdiag.engine.watch import Watch
from distdiag.event import Unobserved
from distdiag.ranks import RankSet


class UnobservedThings(Watch):
    """Lists each once, with the ranks that said so."""

    kinds = (Unobserved,)

    def __init__(self, *_: Any) -> None:  # noqa: ANN401 (it judges nothing)
        """Nothing is missed yet."""
        self._ranks: dict[tuple[str, str, str], set[int]] = {}

    @property
    def not_checked(self) -> dict[str, str]:
        """What is not observed, and why."""
        reasons: dict[str, list[str]] = {}
        for (what, probe, reason), ranks in self._ranks.items():
            text = f"probe {probe} of {RankSet(ranks).phrase()} does not observe it: {reason}"
            reasons.setdefault(what, []).append(text)
        return {what: "; ".join(texts) for what, texts in reasons.items()}

    def feed(self, event: Unobserved) -> None:  # type: ignore[override]
        """Take note of what a rank does not see."""
        key = event.what, event.probe, event.reason
        self._ranks.setdefault(key, set()).add(event.rank)
