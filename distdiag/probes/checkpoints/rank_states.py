"""What each rank gives to a distributed checkpoint under names that all ranks share."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.checkpoints import (
    SavedWeight,
    StateEntry,
    StateRestored,
    StateSaved,
    WeightsSaved,
)
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of, is_own_file
from distdiag.probes.guard import guard, guarded
from distdiag.probes.models.modules import clean_name, slots_of
from distdiag.probes.models.tensor_plans import address_of
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensors.bytes import is_readable, sample
from distdiag.probes.tensors.content import Pending, contents
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_DEEPEST: Final = 8
_MOST_ENTRIES: Final = 2_000
_MOST_BYTES: Final = 1 << 24
_LONGEST: Final = 60
_DCP: Final = "torch.distributed.checkpoint"


class _Weight(NamedTuple):
    key: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    place: tuple[str, str]


class _Call(threading.local):
    now: tuple[tuple[int, ...], str, FrameType] | None = None


class RankStates(Probe):
    """Writes down numbers, texts and bytes that are saved, and those that come back otherwise."""

    name: ClassVar[str] = "rank-states"

    def __init__(
        self,
        recorder: Recorder,
        read: Signal[object, FrameType],
        load_planned: Signal[object, object],
        models: Callable[[], list[nn.Module]],
        name_of: Callable[[nn.Module], str],
    ) -> None:
        """Nothing was saved yet; `read` gets what is read, `load_planned` what is asked for before.

        `models` returns those that there are, and `name_of` the name of one, where it has one.
        """
        super().__init__(recorder)
        self._read = read
        self._load_planned = load_planned
        self._models = models
        self._name_of = name_of
        self._call = _Call()
        self._saved: dict[str, dict[str, StateEntry]] = {}
        self._counts: dict[tuple[int, ...], int] = {}
        self._reading: deque[tuple[dict[str, Any], Sequence[_Weight], Pending]] = deque()

    def _install(self) -> None:
        from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        for name in ("save", "async_save"):
            self._patches.wrap_everywhere(state_dict_saver, name, self._around_save)
        after = self._call_after(self._collected)
        self._patches.wrap(state_dict_saver, "_stateful_to_state_dict", after)
        self._patches.wrap_everywhere(state_dict_loader, "_load_state_dict", self._around_load)
        planning = self._call_before(self._before_planning)
        self._patches.wrap(DefaultLoadPlanner, "set_up_planner", planning)

    @guarded
    def _before_planning(
        self, _: object, asked: object, metadata: object = None, /, *__: object, **___: object
    ) -> None:
        self._load_planned.emit(asked, metadata)

    # Saving

    def _around_save(self, original: AnyCallable) -> AnyCallable:
        call = self._call

        @wrap_like(original)
        def save(*args: object, **kwargs: object) -> object:
            if self.is_off or call.now is not None:
                return original(*args, **kwargs)
            call.now = self._described(kwargs, sys._getframe(1))
            try:
                return original(*args, **kwargs)
            finally:
                call.now = None
                self.flush()

        return save

    @guarded
    def flush(self) -> None:
        """Write down what has been read of weights by now."""
        while self._reading:
            fields, weights, pending = self._reading[0]
            found = pending.take()
            if found is None:
                return  # a device still reads
            self._reading.popleft()
            saved = tuple(
                SavedWeight(key, shape, content.digest, *place)
                for (key, shape, _, place), content in zip(weights, found, strict=True)
                if content is not None
            )
            self.recorder.event(WeightsSaved, weights=saved, **fields)

    def _described(
        self, kwargs: dict[str, Any], frame: FrameType | None
    ) -> tuple[tuple[int, ...], str, FrameType] | None:
        with self.guard:
            while frame is not None and is_own_file(frame.f_code.co_filename):
                frame = frame.f_back
            if frame is None or str(frame.f_globals.get("__name__")).startswith(_DCP):
                return None  # the thread of an asynchronous save, which was seen before
            if kwargs.get("no_dist") or not dist.is_initialized():
                return None
            group = kwargs.get("process_group")
            members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
            writer = kwargs.get("storage_writer")
            return members, _place(kwargs.get("checkpoint_id"), writer), frame
        return None

    @guarded
    def _collected(self, states: Untyped, given: Untyped, /, *_: object, **__: object) -> None:
        if self._call.now is not None:
            self._write(given, states, *self._call.now)

    def _write(
        self,
        given: Mapping[str, Any],
        states: Mapping[str, Any],
        members: tuple[int, ...],
        place: str,
        frame: FrameType,
    ) -> None:
        plain = {k: v for k, v in states.items() if not isinstance(given.get(k), _WEIGHTS)}
        stateful = {k for k in plain if plain[k] is not given.get(k)}
        entries = tuple(entries_of(plain, stateful))
        number = self._counts[members] = self._counts.get(members, 0) + 1
        if place:
            self._saved[place] = {entry.key: entry for entry in entries}
        fields = {
            "number": number,
            "members": members,
            "checkpoint": place,
            "site": CallSite(frames_of(frame, self.recorder.main_script)),
        }
        if entries:
            self.recorder.event(StateSaved, entries=entries, **fields)
        weights = list(islice(self._weights(states), _MOST_ENTRIES))
        if weights and len(members) > 1:
            with out_of_sight():
                pending = contents([sample(each.tensor.detach()) for each in weights])
            pending.guard()
            self._reading.append((fields, weights, pending))

    def _weights(self, states: Mapping[str, Any]) -> Iterator[_Weight]:
        """Yield plain tensors of floating-point numbers, which every rank has whole."""
        places = dict(self._places())
        for key, value in _leaves(states, "", _DEEPEST):
            if type(value) not in (torch.Tensor, nn.Parameter):
                continue
            tensor: Any = value
            if tensor.is_floating_point() and tensor.numel() and is_readable(tensor):
                place = places.get(address_of(tensor) or 0, ("", ""))
                yield _Weight(key, tuple(tensor.shape), tensor, place)

    def _places(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Yield model and name of each tensor that lies somewhere, by its address."""
        for root in self._models():
            model = self._name_of(root)
            for name, _, tensor in slots_of(root) if model else ():
                yield address_of(tensor) or -1, (model, clean_name(name))

    # Loading

    def _around_load(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def load(*args: Untyped, **kwargs: Untyped) -> object:
            result = original(*args, **kwargs)
            if self._read.subscribers:
                self._read.emit(args[0] if args else kwargs.get("state_dict"), sys._getframe(1))
            if not self.is_off and self._saved:
                with guard(self.fail):
                    self._compare(*args[:2], frame=sys._getframe(1), **kwargs)
            return result

        return load

    def _compare(
        self,
        state_dict: Mapping[str, Any],
        storage_reader: object = None,
        *,
        frame: FrameType,
        **_: object,
    ) -> None:
        place = _place(None, storage_reader)
        saved = self._saved.get(place, {})
        changed = []
        for entry in entries_of(state_dict, set()):
            before = saved.get(entry.key)
            if before is not None and before.digest != entry.digest:
                text = f"{before.text} came back as {entry.text}"
                changed.append(
                    StateEntry(entry.key, entry.kind, entry.digest, text, before.is_stateful)
                )
        if changed:
            site = CallSite(frames_of(frame, self.recorder.main_script))
            self.recorder.event(StateRestored, checkpoint=place, entries=tuple(changed), site=site)


_WEIGHTS: Final = (nn.Module, torch.optim.Optimizer)


def entries_of(states: Mapping[str, Any], stateful: set[str]) -> Iterator[StateEntry]:
    """Yield what is neither sharded nor a weight: numbers, texts, bytes and tensors of integers."""
    count = 0
    for key, value in _leaves(states, "", _DEEPEST):
        entry = _entry(key, value, is_stateful=key.split(".")[0] in stateful)
        if entry is not None:
            yield entry
            count += 1
            if count >= _MOST_ENTRIES:
                return


def _leaves(value: object, path: str, depth: int) -> Iterator[tuple[str, object]]:
    items: Iterator[tuple[object, object]]
    if depth and isinstance(value, Mapping):
        items = iter(value.items())
    elif depth and isinstance(value, list | tuple):
        items = iter(enumerate(value))
    else:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key), depth - 1)


def _entry(key: str, value: object, *, is_stateful: bool) -> StateEntry | None:
    kind = type(value).__name__
    if isinstance(value, bool | int | float | str):
        text = repr(value)
        return StateEntry(key, kind, _digest(text.encode()), _short(text), is_stateful)
    if isinstance(value, torch.Tensor):
        return _tensor_entry(key, value, is_stateful=is_stateful)
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    if isinstance(value, bytes | bytearray) and len(value) <= _MOST_BYTES:
        text = f"{len(value)} bytes"
        return StateEntry(key, kind, _digest(bytes(value)), text, is_stateful)
    if kind == "ndarray" and getattr(value, "nbytes", _MOST_BYTES) < _MOST_BYTES:
        array: Any = value
        if array.dtype.kind in "iub":
            text = f"{array.dtype} array {array.shape}"
            return StateEntry(key, kind, _digest(array.tobytes()), text, is_stateful)
    return None


def _tensor_entry(key: str, value: torch.Tensor, *, is_stateful: bool) -> StateEntry | None:
    # Weights that differ are found elsewhere; reading from a device would wait for it.
    is_plain = type(value) is torch.Tensor and value.device.type == "cpu"
    if not is_plain or value.is_floating_point() or value.is_complex():
        return None
    if value.nbytes > _MOST_BYTES:
        return None
    found = contents([value]).take()
    if not found or found[0] is None:
        return None
    text = f"{value.dtype} tensor {tuple(value.shape)}".replace("torch.", "")
    return StateEntry(key, "Tensor", found[0].digest, text, is_stateful)


def _place(checkpoint: object, storage: object) -> str:
    for found in (checkpoint, getattr(storage, "checkpoint_id", None)):
        if isinstance(found, str | os.PathLike):
            return os.path.abspath(found)
    return ""


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
