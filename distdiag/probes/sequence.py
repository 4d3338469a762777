"""Writes down how attention over shared sequences exchanges them, in the first steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, Final

import torch
from torch.distributed import distributed_c10d

from distdiag.event import CallSite
from distdiag.probes.attention_calls import LIBRARIES, Attention, AttentionCalls, Given
from distdiag.probes.attention_masks import read_mask
from distdiag.probes.base import Probe
from distdiag.probes.call_places import Place
from distdiag.probes.forward_arguments import arguments_of
from distdiag.probes.functional_exchanges import PERMUTED
from distdiag.probes.given_positions import PARTED, doubt_of, positions_in
from distdiag.probes.guard import guard
from distdiag.probes.own_steps import is_due
from distdiag.probes.padding_masks import is_call, pad_of, read_padding
from distdiag.probes.post_import import ImportWatch
from distdiag.probes.sequence_exchanges import Exchange, ForwardPass
from distdiag.probes.settled_uses import are_ready, settled
from distdiag.probes.stack import frames_of
from distdiag.probes.tensor_bytes import is_captured
from distdiag.recorder import Recorder
from distdiag.sequence_use_event import AttentionUnread, SequenceUse, UseKind

_KINDS: Final[dict[str, UseKind]] = {
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "ring",
    PERMUTED: "ring",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
}
_FEWEST_DIMS: Final = 3
_NO_TASK: Final = -1
_MOST_WAITING: Final = 64


class _Thread(threading.local):
    """The forward pass that a thread is in the middle of."""

    def __init__(self) -> None:
        self.running = ForwardPass()


class SequenceProbe(Probe):
    """Tells which ranks share sequences, by what they exchange around attention."""

    name: ClassVar[str] = "sequence"

    def __init__(self, recorder: Recorder) -> None:
        """Nothing has happened yet."""
        super().__init__(recorder)
        self._thread = _Thread()
        self._calls = AttentionCalls(self._on_attention, self._patches, self._on_unread)
        self._num_unread = 0
        self._imports = ImportWatch(LIBRARIES, self._on_import)
        self._numbers: dict[tuple[UseKind, tuple[int, ...]], int] = {}
        self._pad: int | None = None
        self._pads: set[int | None] = set()
        self._waiting: deque[tuple[list[Any], dict[str, Any]]] = deque(maxlen=_MOST_WAITING)

    def _install(self) -> None:
        self._calls.install()
        self._imports.start()
        self.recorder.on_given.append(self._on_given)
        self.recorder.on_backward.append(self._on_backward)
        self.recorder.on_step.append(self._on_step)
        self._look(is_due(self.recorder.step))

    def uninstall(self) -> None:
        """Look no longer, and let libraries be imported as before."""
        super().uninstall()
        self._imports.stop()
        self._look(False)

    def flush(self) -> None:
        """Write down what has been read by now."""
        self._guard(self._write)

    def _guard(self, action: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
        if not self.is_off:
            with guard(self._stop):
                action(*args)

    def _stop(self, error: Exception) -> None:
        self.fail(error)
        self._look(False)

    def _look(self, is_wanted: bool) -> None:
        self._calls.is_wanted = is_wanted
        self.recorder.on_exchange = self._on_exchange if is_wanted else None

    def _on_import(self, module: str) -> None:
        self._guard(self._calls.install_library, module)

    def _on_given(self, given: object) -> None:
        if self._calls.is_wanted and not is_call(given):
            self._guard(self._take_batch, given)

    def _take_batch(self, batch: object) -> None:
        pad = pad_of(batch)
        self._pads |= {pad} - {None}
        # Where batches of several loaders differ in it, nobody knows whose the model is given.
        self._pad = pad if len(self._pads) == 1 else None

    # What happens in a forward pass. What a backward pass does is its mirror image.

    def _on_exchange(
        self,
        public: str,
        given: Sequence[torch.Tensor],
        group: Any,  # noqa: ANN401
        peer: int,
        frame: FrameType,
    ) -> None:
        if given and torch._C._current_graph_task_id() == _NO_TASK:
            self._guard(self._exchange, public, given, group, peer, frame)

    def _exchange(
        self,
        public: str,
        given: Sequence[torch.Tensor],
        group: Any,  # noqa: ANN401
        peer: int,
        frame: FrameType,
    ) -> None:
        running, kind, place = self._thread.running, _KINDS.get(public), Place.of(frame)
        members = tuple(distributed_c10d._world.pg_group_ranks.get(group, ()))
        running.combined(public, given[0], members)
        inner = running.inner_of(place, members)
        is_small = given[0].ndim < _FEWEST_DIMS and inner is None
        if kind is None or (kind == "all_gather" and is_small):
            running.returned(place)
            return
        sizes = {each.numel() for each in given}
        if len(sizes) != 1 or len(members) < 2 or not given[0].is_floating_point():
            return
        if inner is not None and inner.is_used:
            return
        is_flat = inner is not None and given[0].ndim == 1
        width = inner.attention.width if inner is not None and is_flat else _width(given[0])
        exchange = Exchange(
            kind=kind,
            place=place,
            members=members,
            size=sum(each.numel() for each in given)
            * (len(members) if kind == "all_gather" else 1),
            peer=members[peer] if kind == "ring" else -1,
            width=width,
            content=None if is_captured(given[0]) else running.read(given, width if is_flat else 0),
            is_permuted=public == PERMUTED,
        )
        if running.add(exchange):
            self._place(frame)

    def _on_attention(self, attention: Attention, frame: FrameType, call: Given) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == _NO_TASK:
            self._guard(self._attend, attention, frame, call)

    def _on_unread(self, error: Exception) -> None:
        self._guard(self._count_unread, f"{type(error).__name__}: {error}".splitlines()[0])

    def _count_unread(self, reason: str) -> None:
        self._num_unread += 1
        if self._num_unread <= _MOST_WAITING:
            number = self._num_unread
            self.recorder.event(
                AttentionUnread, step=self.recorder.step, number=number, reason=reason
            )

    def _attend(self, attention: Attention, frame: FrameType, call: Given) -> None:
        site = CallSite(frames_of(frame, self.recorder.main_script))
        if not self._thread.running.attend(attention, Place.of(frame), site):
            return
        use = self._thread.running.last
        use.mask = read_mask(call, attention, len(use.members))
        self._place(frame)

    def _place(self, frame: FrameType) -> None:
        given = list(arguments_of(frame))
        use = self._thread.running.last
        doubt = PARTED if use.attention.is_parted else doubt_of(given)
        use.place_tokens(positions_in(given, use.num_queries), doubt)
        use.padding = None if self._pad is None else read_padding(given, self._pad)
        for tell in self.recorder.on_given if given else ():
            tell((given[-1].further, given[-1].named))

    # When it is over

    def _on_backward(self) -> None:
        self._guard(self._end)

    def _end(self) -> None:
        uses = self._thread.running.take()
        for kind, members in dict.fromkeys((use.kind, use.members) for use in uses):
            number = self._numbers.get((kind, members), 0)
            self._numbers[kind, members] = number + 1
            mine = [use for use in uses if (use.kind, use.members) == (kind, members)]
            fields = {
                "how": kind,
                "number": number,
                "members": members,
                "step": self.recorder.step,
            }
            self._waiting.append((mine, fields))
        self._write()

    def _on_step(self) -> None:
        self._guard(self._write)
        if not self.is_off:
            self._look(is_due(self.recorder.step))

    def _write(self) -> None:
        while self._waiting and are_ready(self._waiting[0][0]):
            uses, fields = self._waiting.popleft()
            self.recorder.event(SequenceUse, uses=tuple(settled(uses)), **fields)


def _width(tensor: torch.Tensor) -> int:
    return tensor.shape[-1] if tensor.ndim else 0
