"""What probes observe of attention over sequences that several ranks share."""

from typing import Final, Literal

import msgspec

from distdiag.events.base import CallSite, Event, Frame

# What ranks saw of numbered tokens that went through a program's own sequence parallelism.

PAD: Final = -1
"""A place that holds padding instead of a token."""
MIXED: Final = -2
"""A place that holds channels of several tokens, or those of one in another order."""
FOREIGN: Final = -3
"""A place that holds values which belong to no token."""

Reduction = Literal["sum", "mean", "none", ""]
Run = tuple[int, int, int]


class TokenSpec(msgspec.Struct, frozen=True, array_like=True):
    """The numbered tensor, which is the same on all ranks, and what is expected of it.

    Token `i` of row `r` has the number ``r * length + i``. `dim` is the one that is split.
    `documents` are the lengths of those that are packed into a row, none: one. `reduction` is what
    the program does to gradients of parameters over these ranks, empty: not declared.
    """

    shape: tuple[int, ...]
    dim: int
    batch: int
    length: int
    dtype: str = "float32"
    is_causal: bool = False
    documents: tuple[int, ...] = ()
    reduction: Reduction = ""
    has_backward: bool = True

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all rows."""
        return self.batch * self.length

    def context(self, position: int) -> range:
        """Return the positions of the row that the token at one of them should attend to."""
        begin, end = 0, self.length
        for size in self.documents:
            end = begin + size
            if position < end:
                break
            begin, end = end, self.length
        return range(begin, position + 1 if self.is_causal else end)

    def num_attending(self, position: int) -> int:
        """Return by how many tokens of its row a token should be attended."""
        return sum(position in self.context(each) for each in range(self.length))


class Context(msgspec.Struct, frozen=True, array_like=True):
    """Over which tokens of its row one token attended, as runs: first, behind the last, how often.

    It did so in these `heads` (none: in all). `padding` is the share that went to padding.
    `is_mixed`: what it got is that of another head or row.
    """

    token: int
    runs: tuple[Run, ...]
    padding: float = 0.0
    is_mixed: bool = False
    heads: tuple[int, ...] = ()


class TokenTrace(Event, frozen=True, kw_only=True):
    """What one rank saw when numbered tokens went through split, attention and gather.

    `members` are the ranks that share the sequence, in the order of their group. `parts` are the
    tokens that this rank holds after the split, `gathered` those after the gather, row by row; a
    `gathered_shape` is missing if nothing gathers.
    `scales` say by what the gradient of each token was multiplied on this rank, `attended` the same
    summed over the tokens that attend to it; NaN where its channels disagree. Empty are those
    that were not read. `gradients` are those of random queries, keys and values that came to
    this rank, one number for each token, and `due_gradients` those of plain attention over whole
    rows; both only where the output was that of plain attention. `functions` says where the program
    defines what was called, by stage. `error` is what one of them raised, in `stage`.
    Unless `is_form_sure`, tensors of the program may have their dimensions in another order.
    """

    name: str
    number: int
    members: tuple[int, ...]
    spec: TokenSpec
    site: CallSite
    functions: tuple[tuple[str, Frame], ...] = ()
    part_shape: tuple[int, ...] = ()
    gathered_shape: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()
    contexts: tuple[Context, ...] = ()
    attention_shape: tuple[int, ...] = ()
    attended: tuple[float, ...] = ()
    gradients: tuple[tuple[float, ...], ...] = ()
    due_gradients: tuple[tuple[float, ...], ...] = ()
    stage: str = ""
    error: str = ""
    is_form_sure: bool = True

    @property
    def place(self) -> tuple[str, int]:
        """What is the same on all ranks at the same moment."""
        return (self.name, self.number)


class SequenceUnverified(Event, frozen=True, kw_only=True):
    """What a library splits sequences with, and the `reason` why no tokens went through it."""

    name: str
    reason: str


# What a forward pass with shared attention was given, and what it exchanged.

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
