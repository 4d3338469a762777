"""Right and wrong implementations of sequence parallelism, and what is wrong with the latter."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from distdiag.sequence import FaultKind
from tests.sequence import blocks
from tests.sequence.blocks import both, gather, split
from tests.sequence.softmax_ring import softmax_ring

LENGTH = 16
ODD = 13


class Case(NamedTuple):
    """One implementation. `kinds` of faults are expected, and of the first of them these `tokens`.

    `tokens` and `culprits` get the number of ranks. Tokens are positions in each row, or numbers
    over all rows where these are not alike (`is_flat`). `num_exact` kinds have the tokens together.
    """

    name: str
    functions: tuple[Callable[..., Any], ...]
    kinds: tuple[FaultKind, ...] = ()
    tokens: Callable[[int], set[int]] = lambda ranks: set(range(LENGTH))
    options: Mapping[str, Any] = MappingProxyType({})
    culprits: Callable[[int], set[int]] = lambda ranks: set(range(ranks))
    is_flat: bool = False
    num_exact: int = 1


def options(**more):
    return {"length": LENGTH, "heads": 4, "hidden": 4, "reduction": "sum"} | more


MEAN = options(reduction="mean")
NONE = options(reduction="none")
CAUSAL = options(causal=True)
DOCUMENTS = (5, 11)
WHOLE = {"back": "gather"}
SUM = {"back": "sum"}
ZIGZAG = {"order": "head-tail"}
STRIPES = {"order": "interleaved"}

RIGHT = [
    Case("plain, gradients summed", both()),
    Case("plain, gradients averaged", both(None, SUM), options=MEAN),
    Case("megatron scatter and gather", both(WHOLE), options=NONE),
    Case("torch's gather", (split, blocks.torch_gather), options=MEAN),
    Case("DTensor", (blocks.dtensor_split, blocks.dtensor_gather), options=NONE),
    Case("torch's attention over gathered keys",
         (split, blocks.torch_gather, blocks.torch_attention),
         options=options(reduction="mean", causal=True)),
    Case("head-tail order", both(ZIGZAG, ZIGZAG)),
    Case("interleaved order", both(STRIPES, STRIPES)),
    Case("sequence first", both({"dim": 0}, {"dim": 0}), options=options(dim=0)),
    Case("heads first, bfloat16", both({"dim": 2}, {"dim": 2}),
         options=options(dim=2, dtypes=(torch.bfloat16, torch.float16))),
    Case("padded and cut", (blocks.padded_split, partial(blocks.cut, length=ODD)),
         options=options(length=ODD)),
    Case("integers", both(), options=options(dtypes=(torch.int64, torch.int32), heads=0, hidden=0)),
    Case("ulysses", (*both(), blocks.ulysses)),
    Case("ulysses, causal", (*both(), partial(blocks.ulysses, causal=True)), options=CAUSAL),
    Case("ulysses, causal, bfloat16 and many heads",
         (*both(), partial(blocks.ulysses, causal=True)),
         options=options(causal=True, length=48, heads=8, dtypes=(torch.bfloat16,))),
    Case("ring", (*both(None, SUM), blocks.ring), options=MEAN),
    Case("causal ring in head-tail order",
         (*both(ZIGZAG, ZIGZAG), partial(blocks.ring, causal=True, **ZIGZAG)), options=CAUSAL),
    Case("softmax ring", (*both(), softmax_ring)),
    Case("softmax ring, causal, in head-tail order",
         (*both(ZIGZAG, ZIGZAG), partial(softmax_ring, causal=True, **ZIGZAG)), options=CAUSAL),
    Case("softmax ring, bfloat16", (*both(None, SUM), softmax_ring),
         options=options(reduction="mean", dtypes=(torch.bfloat16,))),
    Case("gathered keys of documents",
         (*both(), partial(blocks.gathered_attention, documents=DOCUMENTS)),
         options=options(documents=DOCUMENTS)),
    Case("gathered keys with masked padding",
         (blocks.padded_split, partial(blocks.cut, length=ODD),
          partial(blocks.gathered_attention, length=ODD)), options=options(length=ODD)),
]  # fmt: skip


def step(ranks):
    return LENGTH // ranks


def only(rank, right, wrong):
    """An implementation that is wrong on one rank."""

    def chosen(*args, **more):
        return (wrong if blocks.rank() == rank else right)(*args, **more)

    return chosen


def reversed_cat(parts, dim):
    return torch.cat(parts[::-1], dim)


def hidden_cat(parts, dim):
    return torch.cat(parts, -1)


def zigzag_moved(ranks):
    """Positions at which another token stands when head-tail order is not undone."""
    half = LENGTH // (2 * ranks)
    dealt = []
    for r in range(ranks):
        dealt += [*range(r * half, (r + 1) * half)]
        dealt += [*range(LENGTH - (r + 1) * half, LENGTH - r * half)]
    return {token for place, token in enumerate(dealt) if token != place}


def interleaved_moved(ranks):
    """Positions at which another token stands when interleaved order is not undone."""
    dealt = [token for r in range(ranks) for token in range(r, LENGTH, ranks)]
    return {token for place, token in enumerate(dealt) if token != place}


K = FaultKind
WRONG = [
    Case("begins one late", (partial(blocks.window, begin=1), gather), (K.LOST, K.DUPLICATED),
         lambda ranks: {0}, culprits=lambda ranks: set(range(ranks - 1))),
    Case("begins one early", (partial(blocks.window, begin=-1), gather), (K.LOST, K.DUPLICATED),
         lambda ranks: {LENGTH - 1}, culprits=lambda ranks: set(range(1, ranks))),
    Case("begins two early on the last rank",
         (only(1, split, partial(blocks.window, begin=-2)), gather), (K.LOST, K.DUPLICATED),
         lambda ranks: {2 * step(ranks) - 2, 2 * step(ranks) - 1}, culprits=lambda ranks: {1}),
    Case("is not split", (lambda x: x, lambda x: x), (K.DUPLICATED,)),
    Case("is not gathered", (split, lambda part: part), (K.LOST,), options=options(backward=False)),
    Case("gathered in reverse order", (split, partial(blocks.joined, join=reversed_cat)),
         (K.PERMUTED,)),
    Case("part of the next rank", both({"shift": 1}), (K.OTHER_PART,)),
    Case("gathered along hidden", (split, partial(blocks.joined, join=hidden_cat)),
         (K.WRONG_DIM,)),
    Case("split along heads", both({"dim": 2}, {"dim": 2}), (K.WRONG_DIM,)),
    Case("split along the batch", both({"dim": 0}, {"dim": 0}), (K.WRONG_DIM,),
         options=options(batch=4)),
    Case("head-tail order not undone", both(ZIGZAG), (K.PERMUTED,), zigzag_moved),
    Case("order undone that was not used", both(None, ZIGZAG), (K.PERMUTED,), zigzag_moved),
    Case("interleaved order not undone", both(STRIPES), (K.PERMUTED,),
         interleaved_moved),
    Case("tail dropped", (blocks.dropping_split, gather), (K.LOST,),
         lambda ranks: set(range(ODD // ranks * ranks, ODD)), options=options(length=ODD)),
    Case("padding stays", (blocks.padded_split, gather), (K.PADDED,), lambda ranks: set(),
         options=options(length=ODD)),
    Case("padding in front, cut behind",
         (partial(blocks.padded_split, front=True), partial(blocks.cut, length=ODD)), (K.LOST,),
         lambda ranks: set(range(ODD - (-ODD % ranks), ODD)), options=options(length=ODD)),
    Case("buffers added over one another", (split, partial(blocks.summed_gather, stays=True)),
         (K.FOREIGN, K.MIXED), num_exact=2),
    Case("rows viewed across ranks", (split, blocks.viewed_gather), (K.PERMUTED,),
         lambda ranks: set(range(LENGTH // 2, LENGTH // 2 * 3)), is_flat=True),
    Case("one buffer for all parts", (split, blocks.alias_gather), (K.LOST, K.DUPLICATED),
         lambda ranks: set(range(LENGTH - step(ranks)))),
    Case("no way back", (split, lambda part: torch.cat(blocks.raw_gather(part), 1)),
         (K.GRADIENT,)),
    Case("added buffers without a way back", (split, partial(blocks.summed_gather, stays=False)),
         (K.GRADIENT,)),
    Case("averaged once too often", both(), (K.GRADIENT,), options=MEAN),
    Case("summed twice", both(None, SUM), (K.GRADIENT,)),
    Case("whole gradients summed", both(WHOLE), (K.GRADIENT,)),
    Case("missing scale of the gather", both(WHOLE, SUM), (K.GRADIENT,), options=NONE),
    Case("divided twice", both(None, {"back": "sum", "factor": 0.5}), (K.GRADIENT,), options=MEAN),
    Case("scaled on one rank", (only(0, split, partial(split, factor=3.0)), gather), (K.GRADIENT,),
         lambda ranks: set(range(step(ranks))), culprits=lambda ranks: {0}),
    Case("gradient of the next part", both(None, {"back": "next"}), (K.GRADIENT,)),
    Case("attends to its own part only", (*both(), blocks.local_attention), (K.CONTEXT,)),
    Case("heads come back in reverse order", (*both(), partial(blocks.ulysses, turned_back=True)),
         (K.CONTEXT,)),
    Case("ring one step short", (*both(), partial(blocks.ring, skips=1)), (K.CONTEXT,)),
    Case("ring counts its part twice", (*both(), partial(blocks.ring, again=True)), (K.CONTEXT,)),
    Case("looks ahead", (*both(), blocks.ring), (K.CONTEXT,), lambda ranks: set(range(LENGTH - 1)),
         options=CAUSAL),
    Case("mask on one rank only",
         (*both(), partial(blocks.ulysses, causal=True, mask_on=0)), (K.CONTEXT,),
         lambda ranks: set(range(LENGTH - 1)), options=CAUSAL),
    Case("masked in contiguous order",
         (*both(ZIGZAG, ZIGZAG),
          partial(blocks.gathered_attention, causal=True, believed="contiguous", **ZIGZAG)),
         (K.CONTEXT,), zigzag_moved, options=CAUSAL),
    Case("documents see one another", (*both(), blocks.gathered_attention), (K.CONTEXT,),
         options=options(documents=DOCUMENTS)),
    Case("padding is attended to",
         (blocks.padded_split, partial(blocks.cut, length=ODD), blocks.gathered_attention),
         (K.CONTEXT,), lambda ranks: set(range(ODD)), options=options(length=ODD)),
    Case("ring goes back with one part", (*both(), partial(blocks.ring, causal=True, stale=True)),
         (K.GRADIENT,), options=CAUSAL),
    Case("softmax ring goes back with its own keys", (*both(), partial(softmax_ring, stale=True)),
         (K.ATTENTION_GRADIENT,)),
    Case("softmax ring goes back with a part of the sum",
         (*both(), partial(softmax_ring, local=True)), (K.ATTENTION_GRADIENT,)),
    Case("softmax ring forgets the scale on the way back",
         (*both(None, SUM), partial(softmax_ring, unscaled=True)), (K.ATTENTION_GRADIENT,),
         options=MEAN),
]  # fmt: skip
