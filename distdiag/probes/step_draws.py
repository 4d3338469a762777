"""Random numbers that the program draws for a training step, and the generator's state before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Final

import torch
import xxhash
from torch.jit import _builtins
from torch.utils import _device

from distdiag.data_event import Draw
from distdiag.event import CallSite, Phase
from distdiag.probes.base import AnyCallable, Probe
from distdiag.probes.stack import caller, frames_of
from distdiag.probes.step_feeds import StepFeeds
from distdiag.probes.tensor_bytes import unseen
from distdiag.recorder import Recorder

# Not randperm: programs draw one permutation on all ranks, and each takes its part of it.
_FACTORIES: Final = ("randn", "rand", "randint", "normal")
_LIKE: Final = ("randn_like", "rand_like", "randint_like", "bernoulli", "multinomial")

_WATCHES: Final[list[StepDraws]] = []
"""Who is told of draws; a traced function may hold a number, but not a probe."""


class StepDraws(Probe):
    """Tells of draws while the steps are looked at closely."""

    name: ClassVar[str] = "step-draws"

    def __init__(self, recorder: Recorder, feeds: StepFeeds) -> None:
        """Tell `feeds`, when it wants to know."""
        super().__init__(recorder)
        self._feeds = feeds

    def _install(self) -> None:
        # These tables know functions by identity: the first is filled before ours are in place.
        _device._device_constructors()
        self._number = len(_WATCHES)
        _WATCHES.append(self)
        for name in (*_FACTORIES, *_LIKE):
            original = vars(torch).get(name)
            if original is not None:
                ours = _front(original, self._number)
                _builtins._register_builtin(ours, f"aten::{name}")
                self._patches.replace(torch, name, ours)

    @property
    def is_wanted(self) -> bool:
        """Whether draws are of interest now."""
        is_busy = self.recorder.phase is Phase.DATALOADER  # augmentation is the data's own
        return not (self.is_off or is_busy) and self._feeds.wants_draws

    def state_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return a digest of the generator that a call will use; nothing where it is not known."""
        try:
            return _state(args, kwargs)
        except Exception as error:  # noqa: BLE001 (our part must not break the user's)
            self.fail(error)
            return ""

    def note(self, api: str, result: object, state: str, is_given: bool, frame: FrameType) -> None:
        """Take note of a draw that was made."""
        if not state or not isinstance(result, torch.Tensor) or self.is_off:
            return
        try:
            site = CallSite(frames_of(frame, self.recorder.main_script))
            sizes = tuple(map(int, result.shape))
            is_inside = self._feeds.is_inside
            self._feeds.add_draw(Draw(api, sizes, state, is_inside, is_given, site))
        except Exception as error:  # noqa: BLE001 (our part must not break the user's)
            self.fail(error)


def _front(original: AnyCallable, number: int) -> AnyCallable:
    # Without the mark that other wrappers bear: a compiled program draws inside of its graphs.
    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if torch.compiler.is_compiling() or not _WATCHES[number].is_wanted:
            return original(*args, **kwargs)
        watch = _WATCHES[number]
        state = watch.state_before(args, kwargs)
        result = original(*args, **kwargs)
        is_given = kwargs.get("generator") is not None
        watch.note(original.__name__, result, state, is_given, caller())
        return result

    return draw


def _state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    read = _reader(args, kwargs)
    if read is None:
        return ""
    with unseen():
        state = read()
        return xxhash.xxh3_64_hexdigest(state.numpy().tobytes())


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
    return like.device if like is not None else torch.get_default_device()
