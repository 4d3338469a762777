"""What probes observe of the sharding plans that programs have themselves."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from distdiag.event import CallSite, Event


class PlanSource(StrEnum):
    """Who takes a plan."""

    PARALLELIZE_MODULE = "parallelize_module"
    VEOMNI = "VeOmni"
    TRANSFORMERS = "transformers"


class PlanFault(StrEnum):
    """What may be wrong about a pattern that matches."""

    CLASH = "clash"  # an earlier pattern has taken the name and says something else
    UNEVEN = "uneven"  # the size of the axis does not divide what it splits
    UNLIKE = "unlike"  # the tensor is not as the pattern says


class NamedFault(msgspec.Struct, frozen=True, array_like=True):
    """A fault of one tensor or module; `text` says what is there."""

    fault: PlanFault
    name: str
    text: str


class PatternMatches(msgspec.Struct, frozen=True, array_like=True):
    """One pattern of a plan: what it wants, how much of the model it matches, and the first few.

    `closest` is a name that is probably meant, if nothing matches.
    """

    pattern: str
    wanted: str
    num_matches: int
    matches: tuple[str, ...] = ()
    closest: str = ""
    faults: tuple[NamedFault, ...] = ()


class PlanPatterns(Event, frozen=True, kw_only=True):
    """A program applies a plan to a model, or part of one, of class `model`."""

    source: PlanSource
    model: str
    patterns: tuple[PatternMatches, ...]
    site: CallSite
