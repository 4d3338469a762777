"""Random numbers that the program draws for a training step, and the generator's state before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

import torch
import xxhash
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device

from distdiag.events.base import CallSite, Phase
from distdiag.events.data import Draw
from distdiag.probes.base import AnyCallable, Probe, like
from distdiag.probes.call_sites import caller, frames_of
from distdiag.probes.data.feeds import StepFeeds
from distdiag.probes.data.forward_arguments import running_module
from distdiag.probes.guard import guard
from distdiag.probes.tensors.content import Pending, contents
from distdiag.probes.tensors.kinds import is_awaited, is_dtensor
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder

# Not randperm: programs draw one permutation on all ranks, and each takes its part of it.
_FACTORIES: Final = ("randn", "rand", "randint", "normal")
_LIKE: Final = ("randn_like", "rand_like", "randint_like", "bernoulli", "multinomial")
_MASKS: Final = (
    "dropout",
    "dropout_",
    "alpha_dropout",
    "alpha_dropout_",
    "feature_dropout",
    "feature_dropout_",
    "feature_alpha_dropout",
    "feature_alpha_dropout_",
    "native_dropout",
    "rrelu",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
)
"""What is given activations, and draws for them in training."""


class _Here(threading.local):
    """Whether this thread is in a draw."""

    is_inside = False


class _Before(NamedTuple):
    """What was there before something may have been drawn for an activation."""

    state: str
    device: torch.device
    sizes: tuple[int, ...]
    activation: Pending | None
    awaited: Any = None
    """What stands for an activation that is not there before it is used."""


class StepDraws(Probe):
    """Tells of draws while the steps are looked at closely."""

    name: ClassVar[str] = "step-draws"

    def __init__(self, recorder: Recorder, feeds: StepFeeds) -> None:
        """Tell `feeds`, when it wants to know."""
        super().__init__(recorder)
        self._feeds = feeds
        self._here = _Here()

    def _install(self) -> None:
        self._patches.wrap_all(torch, dict.fromkeys((*_FACTORIES, *_LIKE), self._wrapper))
        self._patches.wrap_all(torch, dict.fromkeys(_MASKS, self._masking))
        self._patches.wrap(torch._C._nn, "scaled_dot_product_attention", self._masking)

    def _wrapper(self, original: AnyCallable) -> AnyCallable:
        here = self._here

        @like(original)
        def draw(*args: object, **kwargs: object) -> object:
            # A mode of torch's functions, that of a default device for one, calls it once more.
            if torch.compiler.is_compiling() or not self._is_wanted or here.is_inside:
                return original(*args, **kwargs)
            state = self._state_before(args, kwargs)
            here.is_inside = True
            try:
                result = original(*args, **kwargs)
            finally:
                here.is_inside = False
            is_given = kwargs.get("generator") is not None
            self._note(original.__name__, result, state, is_given, caller())
            return result

        return draw

    def _masking(self, original: AnyCallable) -> AnyCallable:
        here, feeds = self._here, self._feeds

        @like(original)
        def mask(*args: object, **kwargs: object) -> object:
            # Many functions of each pass come by here: first what mostly tells that nobody looks.
            if feeds.fed is None or torch.compiler.is_compiling() or here.is_inside:
                return original(*args, **kwargs)
            if self.is_off or not feeds.wants_masks:
                return original(*args, **kwargs)
            before = self._before_mask(args)
            here.is_inside = True
            try:
                result = original(*args, **kwargs)
            finally:
                here.is_inside = False
            if before is not None:
                self._note_mask(original.__name__, before, caller())
            return result

        return mask

    @property
    def _is_wanted(self) -> bool:
        is_busy = self.recorder.phase is Phase.DATALOADER  # augmentation is the data's own
        return not (self.is_off or is_busy) and self._feeds.wants_draws

    def _state_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return a digest of the generator that a call will use; nothing where it is not known."""
        with guard(self.fail):
            return _state(args, kwargs)
        return ""

    def _note(self, api: str, result: object, state: str, is_given: bool, frame: FrameType) -> None:
        if not state or not isinstance(result, torch.Tensor) or self.is_off:
            return
        with guard(self.fail):
            self._add(api, tuple(map(int, result.shape)), state, is_given, frame)

    def _before_mask(self, args: tuple[Any, ...]) -> _Before | None:
        """Look at an activation and the generator for its device, unless torch tracks that."""
        tensor = next((each for each in args if isinstance(each, torch.Tensor)), None)
        if tensor is None or is_dtensor(tensor):
            return None
        with guard(self.fail):
            state = _state((tensor,), {})
            sizes = tuple(map(int, tensor.shape))
            if state and is_awaited(tensor):
                return _Before(state, tensor.device, sizes, None, tensor)
            if state:
                pending = contents([tensor])
                pending.guard()
                return _Before(state, tensor.device, sizes, pending)
        return None

    def _note_mask(self, api: str, before: _Before, frame: FrameType) -> None:
        if self.is_off:
            return
        with guard(self.fail):
            # Without training, or with a probability of 0, nothing is drawn.
            if _state((), {"device": before.device}) != before.state:
                activation = before.activation or _after_wait(before.awaited, api)
                self._add(api, before.sizes, before.state, False, frame, activation)

    def _add(
        self,
        api: str,
        sizes: tuple[int, ...],
        state: str,
        is_given: bool,
        frame: FrameType,
        activation: Pending | None = None,
    ) -> None:
        is_inside = self._feeds.is_inside
        module = self._feeds.name_of(running_module(frame)) if is_inside else ""
        site = CallSite(frames_of(frame, self.recorder.main_script))
        draw = Draw(api, sizes, state, is_inside, is_given, site, module)
        self._feeds.add_draw(draw, activation)


def _after_wait(tensor: Untyped, api: str) -> Pending | None:
    """Read what was waited for when it was used, unless that has written over it."""
    if not tensor.completed or api.endswith("_"):
        return None
    pending = contents([tensor.elem])
    pending.guard()
    return pending


def _state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    read = _reader(args, kwargs)
    if read is None:
        return ""
    return xxhash.xxh3_64_hexdigest(read().numpy().tobytes())


def _reader(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], torch.Tensor] | None:
    """Return what reads the state of the generator: on the host, without a wait."""
    generator = kwargs.get("generator")
    device = generator.device if generator is not None else _device_of(args, kwargs)
    if device.type == "cpu":
        return (generator or torch.default_generator).get_state
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    if generator is None:
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    return generator.get_state


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    given = kwargs.get("device")
    if given is not None:
        return torch.device(given)
    like = next((a for a in (*args, kwargs.get("out")) if isinstance(a, torch.Tensor)), None)
    return like.device if like is not None else _default_device()


def _default_device() -> torch.device:
    # As `torch.get_default_device`, which makes a tensor to find out the number of a device.
    modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    found = (each.device for each in modes if isinstance(each, _device.DeviceContext))
    return torch.device(next(found, "cpu"))
