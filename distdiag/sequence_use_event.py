"""What probes observe of attention over sequences that several ranks share."""

from __future__ import annotations

from typing import Literal

import msgspec

from distdiag.event import CallSite, Event

UseKind = Literal["all_to_all", "ring", "all_gather"]


class AttentionUse(msgspec.Struct, frozen=True, array_like=True):
    """One call of attention, and what was exchanged around it in the same module.

    `given` are digests of what this rank gave to the exchanges before it, in their order (empty:
    not readable), `num_distinct` how many rows these hold that differ from one another at least, -1
    if that is not known, where tokens that are all alike would have `num_repeated` of them. The
    attention has seen `num_tokens` of all sequences. `is_returned`: something was exchanged after
    it, too. `peer` is the rank to which a ring sends. `positions` are digests of the positions that
    the module was given for this rank's tokens, of the first attention of a pass; `doubt` says why
    they may be right though they are the same on all ranks.
    """

    given: tuple[str, ...]
    num_distinct: int
    num_repeated: int
    num_tokens: int
    is_returned: bool
    peer: int
    site: CallSite
    positions: tuple[str, ...] = ()
    doubt: str = ""


class SequenceUse(Event, frozen=True, kw_only=True):
    """The attention of one forward pass, over sequences that the ranks of a group share.

    `members` are the ranks of the group in its order, `number` counts such passes.
    """

    how: UseKind
    number: int
    members: tuple[int, ...]
    uses: tuple[AttentionUse, ...]

    @property
    def place(self) -> tuple[str, int]:
        """What is the same on all ranks for the same pass."""
        return (f"{self.how} over {len(self.members)} ranks", self.number)


class AttentionUnread(Event, frozen=True, kw_only=True):
    """A call of attention went through, but its arguments could not be read; `reason` says why.

    `number` counts such calls of the rank.
    """

    number: int
    reason: str
