"""What ranks saw of numbered tokens that went through a program's own sequence parallelism."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from distdiag.event import CallSite, Event, Frame

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
    the program does to gradients of parameters over these ranks, empty: not told.
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


class TokenPassport(Event, frozen=True, kw_only=True):
    """What one rank saw when numbered tokens went through split, attention and gather.

    `members` are the ranks that share the sequence, in the order of their group. `parts` are the
    tokens that this rank holds after the split, `gathered` those after the gather, row by row; a
    `gathered_shape` is missing if nothing gathers.
    `scales` say by what the gradient of each token was multiplied on this rank, `attended` the same
    summed over the tokens that attend to it; NaN where its channels disagree. Empty are those
    that were not looked at. `gradients` are those of random queries, keys and values that came to
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
