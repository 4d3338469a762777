"""What probes observe of random number generators: in which state they are, and who draws."""

import msgspec

from distdiag.events.base import CallSite, Event
from distdiag.events.models import Moment


class GeneratorState(msgspec.Struct, frozen=True, array_like=True):
    """One generator of a process. Equal states have equal digests; `seed` is -1 if it is not known.

    `name` is ``cpu``, ``cuda``, ``numpy`` or ``python``.
    """

    name: str
    digest: str
    seed: int = -1


class RandomState(Event, frozen=True, kw_only=True):
    """The generators of a rank when a model begins, or before the step that `step` counts.

    `members` are the ranks that compute on the same activations with dropout, by a
    tensor-parallel plan; without one they are none.
    """

    moment: Moment
    generators: tuple[GeneratorState, ...]
    members: tuple[int, ...]
    site: CallSite


class RandomDraw(Event, frozen=True, kw_only=True):
    """A random operation on a DTensor whose mesh consists of `members`, before it draws.

    It is the `number`-th on this mesh; `replicas` are the ranks that hold the same part of the
    tensor, `digest` is the state of the generator.
    """

    number: int
    members: tuple[int, ...]
    replicas: tuple[int, ...]
    digest: str
    site: CallSite
