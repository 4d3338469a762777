"""Which codes of a codebook are chosen: indices of the smallest distance to each row."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import exp, log
from typing import Any, ClassVar, Final

import torch
from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.logged import CodesChosen
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.gradients.weighted_sums import PendingValues
from distdiag.probes.guard import guarded
from distdiag.probes.tensors.bytes import is_readable
from distdiag.record.recorder import Recorder

LEAST_CODES: Final = 16
"""Of fewer, a tenth is less than two."""
EVERY: Final = 4
"""Steps between two that are looked at."""
CHOICES_PER_CODE: Final = 4
"""A window has so many choices for each code: even use would leave less than 2 percent unused."""
LEAST_CALLS: Final = 8
MOST_TAKEN: Final = 4096
_MOST_BOOKS: Final = 16
_MOST_SHOWN: Final = 16
_MOST_WAITING: Final = 16
_MOST_SEARCHES: Final = 8


@dataclass(slots=True)
class _Book:
    """One codebook, and what was chosen of it since its last window."""

    num_codes: int
    site: CallSite
    name: str = ""
    num_searches: int = 0
    num_calls: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    waiting: deque[PendingValues] = field(default_factory=lambda: deque(maxlen=_MOST_WAITING))


class CodeChoices(Probe):
    """Counts the results of `argmin` over as many distances as a tensor of a model has rows."""

    name: ClassVar[str] = "code-choices"

    def __init__(self, recorder: Recorder, roots: Callable[[], Iterable[nn.Module]]) -> None:
        """Look for codebooks in the models that `roots` returns."""
        super().__init__(recorder)
        self._roots = roots
        self._books: dict[tuple[object, ...], _Book] = {}

    def _install(self) -> None:
        self._patches.wrap(torch, "argmin", self._choosing)
        self._patches.add(torch.Tensor, "argmin", self._choosing)

    @guarded
    def flush(self) -> None:
        """Write down the windows that have enough choices."""
        for book in self._books.values():
            self._bring(book)

    def _choosing(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def argmin(*args: object, **kwargs: object) -> object:
            result = original(*args, **kwargs)
            step = self.recorder.step
            if step > 0 and step % EVERY == 0 and not self.is_off and args:
                self._chosen(args, kwargs, result)
            return result

        return argmin

    @guarded
    def _chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: object) -> None:
        distances = args[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        if not isinstance(distances, torch.Tensor) or not isinstance(chosen, torch.Tensor):
            return
        if not isinstance(dim, int) or distances.dim() < 2 or not distances.is_floating_point():
            return
        num_codes = distances.shape[dim]
        if num_codes < LEAST_CODES or not chosen.numel() or not is_readable(chosen):
            return
        frame = sys._getframe(3)
        key = (id(frame.f_code), frame.f_lasti, num_codes)
        book = self._books.get(key)
        if book is None and len(self._books) < _MOST_BOOKS:
            site = CallSite(frames_of(frame, self.recorder.main_script))
            book = self._books[key] = _Book(num_codes, site)
        if book is not None and self._has_name(book):
            flat = chosen.detach().reshape(-1)
            taken = flat[:: -(-flat.numel() // MOST_TAKEN)]
            book.waiting.append(PendingValues([taken.double()]))
            self._bring(book)

    def _has_name(self, book: _Book) -> bool:
        """Find the tensor whose rows are chosen, in the models that there are by now."""
        if not book.name and book.num_searches < _MOST_SEARCHES:
            book.num_searches += 1
            book.name = next(self._of_size(book.num_codes), "")
        return bool(book.name)

    def _of_size(self, num_codes: int) -> Iterator[str]:
        for root in self._roots():
            for named in (root.named_parameters(), root.named_buffers()):
                for name, tensor in named:
                    if tensor.dim() >= 2 and tensor.shape[-2] == num_codes:
                        yield name

    def _bring(self, book: _Book) -> None:
        while book.waiting:
            found = book.waiting[0].take()
            if found is None:
                return
            book.waiting.popleft()
            book.num_calls += 1
            book.counts.update(map(int, found[0]))
            is_enough = book.counts.total() >= CHOICES_PER_CODE * book.num_codes
            if is_enough and book.num_calls >= LEAST_CALLS:
                self._write(book)

    def _write(self, book: _Book) -> None:
        counts, book.counts, book.num_calls = book.counts, Counter(), 0
        total = counts.total()
        entropy = -sum(n / total * log(n / total) for n in counts.values())
        self.recorder.event(
            CodesChosen,
            codebook=book.name,
            num_codes=book.num_codes,
            num_choices=total,
            num_used=len(counts),
            perplexity=exp(entropy),
            counts=tuple(counts.most_common(_MOST_SHOWN)),
            site=book.site,
        )
