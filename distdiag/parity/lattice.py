"""Which kind of parallelism brings a divergence in: a walk over combinations of them.

A configuration is named by its parts, joined by ``x``: ``fsdp2xtp2`` stands above ``fsdp2`` and
``tp2``. It brings the divergence in if it differs from the reference and none below it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Origin(NamedTuple):
    """A configuration that differs while everything below it agrees with the reference."""

    label: str
    below: tuple[str, ...]

    def phrase(self) -> str:
        """Say what brings the divergence in."""
        if not self.below:
            return f"{self.label} brings the divergence in"
        agreeing = " and ".join(self.below)
        return f"{self.label} brings the divergence in: {agreeing} by themselves agree"


def parts_of(label: str) -> frozenset[str]:
    """Return the parts of a configuration's name."""
    return frozenset(part for part in label.split("x") if part)


def in_order(labels: Sequence[str]) -> list[str]:
    """Return labels with fewer parts before those with more, else as they were."""
    return sorted(labels, key=lambda label: len(parts_of(label)))


def origins(differs: Mapping[str, bool]) -> list[Origin]:
    """Return what brings a divergence in, by whether each configuration differs."""
    found = []
    for label in in_order(list(differs)):
        below = [each for each in differs if parts_of(each) < parts_of(label)]
        if differs[label] and not any(differs[each] for each in below):
            found.append(Origin(label, tuple(below)))
    return found
