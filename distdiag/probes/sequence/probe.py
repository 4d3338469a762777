"""Writes down how attention over shared sequences exchanges them, in the first steps."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch.distributed import distributed_c10d

from distdiag.events.base import CallSite
from distdiag.events.sequences import AttentionUnread, AttentionUse, SequenceUse, UseKind
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.collectives.functional_exchanges import PERMUTED
from distdiag.probes.data.forward_arguments import Arguments, arguments_of
from distdiag.probes.data.padding_masks import is_call, pad_of, read_padding
from distdiag.probes.guard import guarded
from distdiag.probes.models.own_steps import is_due
from distdiag.probes.patching.post_import import ImportHook
from distdiag.probes.sequence.attention_calls import LIBRARIES, Attention, AttentionCalls, Given
from distdiag.probes.sequence.attention_masks import read_mask
from distdiag.probes.sequence.exchanges import Exchange, ForwardPass, Place, Use
from distdiag.probes.tensors.bytes import is_captured, is_readable
from distdiag.probes.tensors.content import Pending
from distdiag.probes.tensors.sample_rows import tensors_in
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal, Unsubscribe

# Makes events of exchanges around attention, once all that is read of them is there.


def settled(uses: Sequence[Use]) -> Iterator[AttentionUse]:
    """Yield what is written down; all contents are there."""
    for use in uses:
        digests: list[str] = []
        distinct = -1
        for exchange in use.before:
            found = exchange.content.take() if exchange.content is not None else None
            parts = [] if found is None else [each.digest if each else "" for each in found[:-1]]
            digests.append("".join(parts) if parts and "" not in parts else "")
            last = found[-1] if found else None
            distinct = max(distinct, int(last.mean) if last is not None else -1)
        heads = use.attention.num_heads * len(use.members)
        is_by_head = use.attention.width in (0, use.before[0].width)
        yield AttentionUse(
            given=tuple(digests),
            num_distinct=distinct,
            num_repeated=heads if is_by_head else len(use.members),
            num_tokens=use.attention.num_tokens,
            is_returned=use.is_returned,
            peer=use.before[0].peer,
            site=use.site,
            positions=() if use.positions is None else _digests(use.positions),
            doubt=use.doubt,
            mask=None if use.mask is None else use.mask.settle(use.mask.pending.take() or []),
            padding=use.padding.settle(use.padding.pending.take() or []) if use.padding else None,
        )


def _digests(pending: Pending) -> tuple[str, ...]:
    return tuple(each.digest if each else "" for each in pending.take() or ())


def are_ready(uses: Sequence[Use]) -> bool:
    """Say whether all contents have been read."""
    return all([each.take() is not None for use in uses for each in use.pending])


# The positions of tokens that a module with attention was given, known by their usual names.

_NAMES: Final = {"pos", "position", "positions", "rope", "rotary", "freqs", "cos", "sin"}
_OTHERS: Final = {"bias", "mask", "rank", "offset"}
_MOVED: Final = {"rank", "offset", "shift", "start"}
_BOUNDS: Final = {"seqlens", "document", "documents", "doc", "docs", "segment", "segments"}
PARTED: Final = "attention was given a mask or bounds of documents, which may begin with the parts"
_MAY_MOVE: Final = "{} may move positions on by the rank"
_MOST_TENSORS: Final = 4
_MOST_ELEMENTS: Final = 1 << 22


def positions_in(passes: Iterable[Arguments], length: int) -> list[torch.Tensor]:
    """Return what the innermost of the running modules was given for `length` tokens.

    Whole numbers that the modules may move on, by what they name, say nothing.
    """
    is_moved = False
    for each in passes:
        is_moved = is_moved or bool(_MOVED & set(_words_of(each.code)))
        found = [
            tensor
            for name, value in each.named.items()
            if _is_position(name)
            for tensor in tensors_in(value)
            if is_readable(tensor) and _is_for(tensor, length)
        ]
        if found:
            is_sure = all(map(torch.Tensor.is_floating_point, found)) or not is_moved
            return found[:_MOST_TENSORS] if is_sure else []
    return []


def doubt_of(passes: Iterable[Arguments]) -> str:
    """Say why positions may be right that are the same on all ranks, as far as names tell it."""
    for each in passes:
        for name, value in each.named.items():
            if value is not None and _BOUNDS & set(name.lower().split("_")):
                return PARTED
        for code in each.called:
            words = {*_words_of(code), *code.co_name.lower().split("_")}
            if _NAMES & words and _MOVED & words:
                return _MAY_MOVE.format(code.co_name)
    return ""


def _is_position(name: str) -> bool:
    words = set(name.lower().split("_"))
    return bool(words & _NAMES) and not words & _OTHERS


def _is_for(tensor: torch.Tensor, length: int) -> bool:
    """Say whether a tensor has a position, or an angle for each channel, for each token."""
    if not 0 < tensor.numel() <= _MOST_ELEMENTS or tensor.is_complex():
        return False
    if not tensor.is_floating_point():
        return tensor.shape[-1] == length
    return max(tensor.shape[:-1], default=0) == length and tensor.shape[-1] != length


def _words_of(code: CodeType) -> Iterator[str]:
    names: Iterable[Any] = (*code.co_names, *code.co_varnames, *code.co_freevars)
    for name in names:
        yield from name.lower().split("_")


# The probe.

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


class Moments(NamedTuple):
    """When to look, as `Signals` says; `inputs_seen` gets what attention is given."""

    inputs_seen: Signal[object]
    exchange_starting: Signal[str, Sequence[torch.Tensor], Any, int, FrameType]
    before_backward: Signal[[]]
    step_ended: Signal[[]]


class SequenceProbe(Probe):
    """Tells which ranks share sequences, by what they exchange around attention."""

    name: ClassVar[str] = "sequence"

    def __init__(self, recorder: Recorder, moments: Moments) -> None:
        super().__init__(recorder)
        self._moments = moments
        self._unsubscribe: Unsubscribe | None = None
        self._thread = _Thread()
        self._calls = AttentionCalls(self._on_attention, self._patches, self._on_unread)
        self._num_unread = 0
        self._imports = ImportHook(LIBRARIES, self._on_import)
        self._numbers: dict[tuple[UseKind, tuple[int, ...]], int] = {}
        self._pad: int | None = None
        self._pads: set[int | None] = set()
        self._waiting: deque[tuple[list[Any], dict[str, Any]]] = deque(maxlen=_MOST_WAITING)

    def _install(self) -> None:
        self._calls.install()
        self._imports.start()
        self._subscribe(self._moments.inputs_seen, self._on_given)
        self._subscribe(self._moments.before_backward, self._on_backward)
        self._subscribe(self._moments.step_ended, self._on_step)
        self._look(is_due(self.recorder.step))

    def uninstall(self) -> None:
        """Look no longer, and let libraries be imported as before."""
        super().uninstall()
        self._imports.stop()
        self._look(False)

    def flush(self) -> None:
        """Write down what has been read by now."""
        self._write()

    def fail(self, error: Exception) -> None:
        """Look no longer."""
        super().fail(error)
        self._look(False)

    def _look(self, is_wanted: bool) -> None:
        self._calls.is_wanted = is_wanted
        if is_wanted and self._unsubscribe is None:
            self._unsubscribe = self._moments.exchange_starting.subscribe(self._on_exchange)
        elif not is_wanted and self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    @guarded
    def _on_import(self, module: str) -> None:
        self._calls.install_library(module)

    def _on_given(self, given: object) -> None:
        if self._calls.is_wanted and not is_call(given):
            self._take_batch(given)

    @guarded
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
        group: object,
        peer: int,
        frame: FrameType,
    ) -> None:
        if given and torch._C._current_graph_task_id() == _NO_TASK:
            self._exchange(public, given, group, peer, frame)

    @guarded
    def _exchange(
        self,
        public: str,
        given: Sequence[torch.Tensor],
        group: Untyped,
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
            self._attend(attention, frame, call)

    @guarded
    def _on_unread(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._num_unread += 1
        if self._num_unread <= _MOST_WAITING:
            number = self._num_unread
            self.recorder.event(
                AttentionUnread, step=self.recorder.step, number=number, reason=reason
            )

    @guarded
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
        if given:
            self._moments.inputs_seen.emit((given[-1].further, given[-1].named))

    # When it is over

    @guarded
    def _on_backward(self) -> None:
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
        self._write()
        if not self.is_off:
            self._look(is_due(self.recorder.step))

    @guarded
    def _write(self) -> None:
        while self._waiting and are_ready(self._waiting[0][0]):
            uses, fields = self._waiting.popleft()
            self.recorder.event(SequenceUse, uses=tuple(settled(uses)), **fields)


def _width(tensor: torch.Tensor) -> int:
    return tensor.shape[-1] if tensor.ndim else 0
