"""Which call makes whose host wait for whom: the edges of happens-before, as data."""

from typing import Final

from distdiag.events.base import CallSite
from distdiag.events.collectives import Collective, GroupCreated

Senders = tuple[int, ...] | None
"""The ranks that a call waits for; None: all members."""

NOBODY: Final = ()

_FROM_ROOT: Final = frozenset({"broadcast", "scatter"})
_TO_ROOT: Final = frozenset({"reduce", "gather", "gather_into_tensor"})
_FUNCTIONAL: Final = "torch/distributed/_functional_collectives.py"

RECORDS_OF_ORDER: Final = frozenset(
    {
        "agent",
        "collective-wrappers",
        "collectives",
        "event-file",
        "functional-collectives",
        "host-waits",
        "process-groups",
        "store-calls",
        "work",
    }
)
"""Without one of these probes a rank may have waited for another one unseen."""


def senders_of(call: Collective) -> Senders:
    """Return the ranks whose call must have been issued before this one can end."""
    signature = call.signature
    if signature.root is not None and signature.op in _FROM_ROOT:
        return NOBODY if signature.root == call.rank else (signature.root,)
    if signature.root is not None and signature.op in _TO_ROOT:
        return None if signature.root == call.rank else NOBODY
    if 0 in signature.output_splits:
        ranks = zip(call.group.ranks, signature.output_splits, strict=False)
        # Whoever sends nothing need not have come.
        return tuple(rank for rank, rows in ranks if rows and rank != call.rank)
    return None


def is_waited_unseen(call: Collective) -> bool:
    """Whether nobody ever tells when the call was waited for.

    C++ (the reducer of DDP) waits for its own calls, and the result of a functional collective is
    waited for where it is used.
    """
    return call.api is None or _is_functional(call.site)


def _is_functional(site: CallSite) -> bool:
    return any(frame.file.endswith(_FUNCTIONAL) for frame in site.frames[:4])


def creates_in_step(call: GroupCreated) -> bool:
    """Whether all ranks that make this call wait for one another in it.

    Gloo connects its members at once. Where the backend is not known it is taken for gloo: a wait
    too many hides a race, a wait too few accuses a correct program.
    """
    return not call.backend or "gloo" in call.backend
