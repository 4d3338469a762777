"""Tells of calls of attention, whichever function computes it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch.nn import functional

from distdiag.probes.base import AnyCallable, Patches, Wrap, like
from distdiag.probes.guard import guard
from distdiag.probes.tensors.kinds import is_awaited, is_dtensor, sharing_of

LIBRARIES: Final = {
    "flash_attn.flash_attn_interface": (
        "flash_attn_func",
        "flash_attn_varlen_func",
        "_flash_attn_forward",
        "_flash_attn_varlen_forward",
    ),
    "flash_attn_interface": ("flash_attn_func", "flash_attn_varlen_func"),
    "xformers.ops.fmha": ("memory_efficient_attention",),
}
"""Functions of libraries whose first arguments are query, key and value."""

_BOUNDS: Final = {"attn_mask", "attn_bias", "cu_seqlens", "cu_seqlens_q"}
_FEWEST_DIMS: Final = 3
_BATCHED_DIMS: Final = 4
_TOKENS: Final = -2


Form = Literal["query", "rows", "scores"]


class Attention(NamedTuple):
    """A call of attention.

    `sizes` are the numbers of elements of query, key and value; of scores from which nobody can
    tell them it is only known what divides that of the query: `unit`. A
    sequence has `num_queries` and `num_keys`. Of DTensors they are those of this rank's part, and
    `members` are the ranks over which their sequences are split: these exchange within the call.
    `is_parted`: it was given a mask, or where sequences begin.
    """

    sizes: tuple[int, ...]
    unit: int
    num_tokens: int
    num_heads: int
    width: int
    num_queries: int
    num_keys: int
    members: tuple[int, ...] = ()
    is_parted: bool = False


class Given(NamedTuple):
    """What a call of attention was given: query, key and value, or rows of them, or scores."""

    form: Form
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def argument(self, index: int, name: str) -> object:
        """Return one argument, None if it was not given."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name)


class _Here(threading.local):
    """Whether this thread is in a call of attention."""

    is_inside = False


OnAttention = Callable[[Attention, FrameType, Given], None]


class AttentionCalls:
    """Stands in the place of the functions that compute attention."""

    def __init__(
        self,
        tell: OnAttention,
        patches: Patches,
        unread: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Hand calls to `tell` while `is_wanted`, and to `unread` what kept them from being read.

        Neither raises anything.
        """
        self.is_wanted = False
        self.here = _Here()
        self.unread = unread
        self._patches = patches
        self._number = len(_LISTENERS)
        _LISTENERS.append((self, tell))

    def install(self) -> None:
        """Put the patchs of torch in place."""
        self._patches.wrap(functional, "scaled_dot_product_attention", self._wrapper("query"))
        self._patches.wrap(torch, "softmax", self._wrapper("scores"))
        self._patches.add(torch.Tensor, "softmax", self._wrapper("scores"))

    def install_library(self, module: str) -> None:
        """Put those of a library in place, which has been imported."""
        for name in LIBRARIES[module]:
            if name in vars(sys.modules[module]):  # they have other names in other versions
                self._patches.wrap(sys.modules[module], name, self._wrapper("rows"))

    def _wrapper(self, form: Form) -> Wrap:
        return partial(_wrapper, number=self._number, form=form)


def _wrapper(original: AnyCallable, number: int, form: Form) -> AnyCallable:
    read = _READERS[form]

    # Without the mark that other wrappers bear: compiled programs call attention in their graphs.
    @like(original)
    def attention(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or not _LISTENERS[number][0].is_wanted:
            return original(*args, **kwargs)
        calls, tell = _LISTENERS[number]
        if calls.here.is_inside:  # a mode of torch's functions calls it once more
            return original(*args, **kwargs)
        found, problems = None, list[Exception]()
        with guard(problems.append):
            found = read(args, kwargs)
        if found is not None:
            is_parted = any(kwargs.get(name) is not None for name in _BOUNDS)
            is_parted = is_parted or any(map(_is_plain, args[3:]))
            found = found._replace(is_parted=is_parted)
            tell(found, sys._getframe(1), Given(form, args, kwargs))
        # It says itself what is wrong with its arguments: an error of ours is not its context.
        calls.here.is_inside = True
        try:
            result = original(*args, **kwargs)
        finally:
            calls.here.is_inside = False
        for problem in problems:
            calls.unread(problem)
        return result

    return attention


def _is_plain(tensor: object) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or is_awaited(tensor)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    given = list(args[:3])
    for names in (("query", "q"), ("key", "k"), ("value", "v"))[len(given) :]:
        given.append(next((kwargs[name] for name in names if name in kwargs), None))
    return given


def _tensors(given: list[Any]) -> list[torch.Tensor] | None:
    return given if all(map(_is_plain, given)) and given[0].ndim >= _FEWEST_DIMS else None


def _of_query(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention | None:
    """Read batch, heads, tokens, width."""
    given = _given(args, kwargs)
    members = sharing_of(given, _TOKENS) if all(map(is_dtensor, given)) else ()
    tensors = _tensors([each._local_tensor for each in given] if members else given)
    if tensors is None:
        return None
    *batch, heads, tokens, width = tensors[0].shape
    lengths = tokens, tensors[1].shape[-2]
    num_tokens = functools.reduce(int.__mul__, batch, 1) * tokens
    found = _attention(tensors, num_tokens, heads, width, lengths)
    return found._replace(members=members)


def _of_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention | None:
    """Read batch, tokens, heads, width."""
    tensors = _tensors(_given(args, kwargs))
    if tensors is None:
        return None
    *rows, heads, width = tensors[0].shape
    lengths = rows[-1], tensors[1].shape[-3]
    return _attention(tensors, functools.reduce(int.__mul__, rows, 1), heads, width, lengths)


def _attention(
    tensors: list[torch.Tensor],
    num_tokens: int,
    num_heads: int,
    width: int,
    lengths: tuple[int, int],
) -> Attention:
    sizes = tuple(each.numel() for each in tensors)
    return Attention(sizes, 0, num_tokens, num_heads, width, *lengths)


def _of_scores(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention | None:
    """Read batch, heads, queries, keys."""
    scores: Any = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not _is_plain(scores) or scores.ndim < _FEWEST_DIMS or dim not in (-1, scores.ndim - 1):
        return None
    *batch, heads, queries, keys = scores.shape
    if scores.ndim < _BATCHED_DIMS:
        return Attention((), heads * queries, -1, heads, 0, queries, keys)
    num_tokens = functools.reduce(int.__mul__, batch, 1) * queries
    return Attention((), num_tokens * heads, num_tokens, heads, 0, queries, keys)


_READERS: Final = {"query": _of_query, "rows": _of_rows, "scores": _of_scores}
_LISTENERS: Final[list[tuple[AttentionCalls, OnAttention]]] = []
"""Who is notified of calls; a traced function may hold a number, but not a probe."""
