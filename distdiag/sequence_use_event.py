"""What probes observe of attention over sequences that several ranks share."""

from __future__ import annotations

from typing import Literal

import msgspec

from distdiag.event import CallSite, Event

UseKind = Literal["all_to_all", "ring", "all_gather"]


class SeenMask(msgspec.Struct, frozen=True, array_like=True):
    """Which keys a call of attention could see, and where its queries were placed.

    The keys are looked at in as many equal `parts` as ranks share them: a digest of which keys of
    a part any query sees in each row, and their share. Both are empty where there is no mask, or it
    was not read. `num_queries` queries are `aligned` with the ``first`` or the ``last`` of
    `num_keys` keys by causality alone, which is empty otherwise. Of packed rows `ends` are the last
    cumulative lengths of queries and keys, and `num_rows` the rows that there are.
    """

    parts: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    aligned: Literal["", "first", "last"] = ""
    num_queries: int = 0
    num_keys: int = 0
    ends: tuple[int, ...] = ()
    num_rows: tuple[int, ...] = ()


class SeenPadding(msgspec.Struct, frozen=True, array_like=True):
    """The token ids that a module was given, with a mask of their form, on this rank.

    `ids` and `mask` are digests. Padding has the one `pad` id that the masked tokens of the batch
    have, and no others of it. Of `num_tokens` in `num_rows` rows `num_pads` are padding and
    `num_masked` are masked; `num_hidden` tokens are masked that are none, and of the padding that
    is not masked `num_shown` stands in rows of which the mask hides something.
    """

    ids: str
    mask: str
    pad: int
    num_rows: int
    num_tokens: int
    num_pads: int
    num_masked: int
    num_hidden: int
    num_shown: int


class AttentionUse(msgspec.Struct, frozen=True, array_like=True):
    """One call of attention, and what was exchanged around it in the same module.

    `given` are digests of what this rank gave to the exchanges before it, in their order (empty:
    not readable), `num_distinct` how many rows these hold that differ from one another at least, -1
    if that is not known, where tokens that are all alike would have `num_repeated` of them. The
    attention has seen `num_tokens` of all sequences. `is_returned`: something was exchanged after
    it, too. `peer` is the rank to which a ring sends. `positions` are digests of the positions that
    the module was given for this rank's tokens, `mask` and `padding` what hides tokens; all three
    are of the first attention of a pass. `doubt` says why positions may be right though they are
    the same on all ranks.
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
    mask: SeenMask | None = None
    padding: SeenPadding | None = None


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
