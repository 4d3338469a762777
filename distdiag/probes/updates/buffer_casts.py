"""Notices that a cast of a module rounded buffers from which it computes angles of positions."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Final

import torch
from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.models import ObjectKind
from distdiag.events.updates import PositionsRounded
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import caller, frames_of
from distdiag.probes.creations import Creations
from distdiag.probes.gradients.weighted_sums import PendingValues
from distdiag.probes.guard import guard
from distdiag.probes.models.modules import ModuleHook, clean_name, own_buffers
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.bytes import is_captured, is_readable
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder

_MOST_ELEMENTS: Final = 1 << 20
_NUM_PASSES: Final = 3
"""So many forward passes of a module are looked at: their positions are those of a training."""
_MOST_WAITING: Final = 64


@dataclass(slots=True)
class _Cast:
    """A buffer that a cast has narrowed; both figures are on its device."""

    fields: dict[str, Any]
    error: torch.Tensor
    largest: torch.Tensor


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Watched:
    """A module with such buffers: what hooks it has, and how many passes were seen."""

    casts: list[_Cast]
    handles: list[Any] = field(default_factory=list)
    num_passes: int = 0


class _Inside(threading.local):
    """The modules with such buffers whose forward passes this thread is in."""

    def __init__(self) -> None:
        self.watched: list[_Watched] = []


class BufferCasts(Probe):
    """Looks at what a module whose buffer was narrowed gives to sine and cosine."""

    name: ClassVar[str] = "buffer-casts"

    def __init__(self, recorder: Recorder, creations: Creations) -> None:
        """Know of no cast yet."""
        super().__init__(recorder)
        self._creations = creations
        self._depth = threading.local()
        self._inside = _Inside()
        self._watched: WeakMap[nn.Module, _Watched] = WeakMap()
        self._has_patched = False
        self._waiting: deque[tuple[_Cast, str, PendingValues]] = deque(maxlen=_MOST_WAITING)

    def _install(self) -> None:
        self._patches.wrap(nn.Module, "_apply", self._around_apply)

    def flush(self) -> None:
        """Write down what has been read by now."""
        if not self.is_off:
            with guard(self.fail):
                self._write()

    def uninstall(self) -> None:
        """Take the hooks of modules away, too."""
        super().uninstall()
        for watched in self._watched.values():
            _let_go(watched)

    def _around_apply(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def _apply(self_: Untyped, *args: Untyped, **kwargs: Untyped) -> object:
            is_inner = getattr(self._depth, "is_inside", False)
            if self.is_off or is_inner or torch.compiler.is_compiling():
                return original(self_, *args, **kwargs)
            before: list[tuple[str, nn.Module, str, torch.Tensor]] = []
            with guard(self.fail):
                before = _wide_buffers(self_)
            self._depth.is_inside = True
            try:
                result = original(self_, *args, **kwargs)
            finally:
                self._depth.is_inside = False
            with guard(self.fail):
                self._compare(self_, before, caller())
            return result

        return _apply

    def _compare(
        self,
        root: nn.Module,
        before: list[tuple[str, nn.Module, str, torch.Tensor]],
        frame: FrameType,
    ) -> None:
        site: CallSite | None = None
        for path, module, name, old in before:
            new = own_buffers(module).get(name)
            if new is None or not _is_narrowed(old, new):
                continue
            site = site or CallSite(frames_of(frame, self.recorder.main_script))
            self._creations.tell(ObjectKind.MODEL, type(root).__name__, root)
            fields = {
                "buffer": clean_name(f"{path}.{name}" if path else name),
                "model": type(root).__name__,
                "dtype_before": str(old.dtype).removeprefix("torch."),
                "dtype": str(new.dtype).removeprefix("torch."),
                "site": site,
            }
            wide = old.detach().double()
            error = (wide - new.detach().to(wide.device).double()).abs().amax()
            self._watch(module, _Cast(fields, error, wide.abs().amax()))

    def _watch(self, module: nn.Module, cast: _Cast) -> None:
        watched = self._watched.get(module)
        if watched is None:
            watched = self._watched[module] = _Watched([])
            self._patch()
            reference = weakref.ref(watched)
            watched.handles += [
                module.register_forward_pre_hook(ModuleHook(partial(self._begin, reference))),
                module.register_forward_hook(
                    ModuleHook(partial(self._end, reference)), always_call=True
                ),
            ]
        watched.casts.append(cast)

    def _patch(self) -> None:
        """See sine and cosine from now on; a program without such a cast is left alone."""
        if self._has_patched:
            return
        self._has_patched = True
        for name in ("cos", "sin"):
            wrap = self._call_before(partial(self._before_angle, name))
            self._patches.wrap(torch, name, wrap)
            self._patches.add(torch.Tensor, name, wrap)

    def _begin(self, reference: weakref.ref[_Watched], *_: object) -> None:
        watched = reference()
        if watched is not None and not self.is_off:
            self._inside.watched.append(watched)

    def _end(self, reference: weakref.ref[_Watched], *_: object) -> None:
        watched = reference()
        if watched is None or watched not in self._inside.watched:
            return
        self._inside.watched.remove(watched)
        watched.num_passes += 1
        with guard(self.fail):
            if watched.num_passes >= _NUM_PASSES:
                _let_go(watched)
            self._write()

    def _before_angle(self, name: str, angles: Untyped = None, /, *_: object, **__: object) -> None:
        if not self._inside.watched or torch.compiler.is_compiling():
            return
        with guard(self.fail):
            is_tensor = isinstance(angles, torch.Tensor) and angles.is_floating_point()
            if not is_tensor or not is_readable(angles) or not angles.numel():
                return
            largest = angles.detach().abs().amax().double()
            for cast in self._inside.watched[-1].casts:
                on_device = [cast.error, cast.largest, largest]
                if not any(map(is_captured, on_device)):
                    self._waiting.append((cast, name, PendingValues(on_device)))

    def _write(self) -> None:
        while self._waiting:
            cast, function, pending = self._waiting[0]
            found = pending.take()
            if found is None:
                return
            self._waiting.popleft()
            (error,), (value,), (angle,) = found
            self.recorder.event(
                PositionsRounded,
                largest_error=error,
                largest_value=value,
                largest_angle=angle,
                function=function,
                step=self.recorder.step,
                **cast.fields,
            )


def _wide_buffers(root: nn.Module) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    """Return path, owner, name and value of buffers that a cast may round.

    Statistics of normalisation are none of these: they are measured, and no angles.
    """
    return [
        (path, module, name, buffer)
        for path, module in root.named_modules()
        if not isinstance(module, nn.modules.batchnorm._NormBase)
        for name, buffer in own_buffers(module).items()
        if buffer is not None
        and buffer.dtype in (torch.float32, torch.float64)
        and 0 < buffer.numel() <= _MOST_ELEMENTS
        and is_readable(buffer)
    ]


def _is_narrowed(old: torch.Tensor, new: torch.Tensor) -> bool:
    is_narrower = new.is_floating_point() and new.element_size() < min(4, old.element_size())
    return is_narrower and new.shape == old.shape and is_readable(new)


def _let_go(watched: _Watched) -> None:
    for handle in watched.handles:
        handle.remove()
    watched.handles.clear()
