"""Numbers that a program hands to `distdiag.log` or to a logger that we know, by their names."""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from numbers import Real
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

import torch

from distdiag.events.base import CallSite
from distdiag.events.logged import NOWHERE, Logged
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.gradients.weighted_sums import PendingValues
from distdiag.probes.guard import guarded
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped
from distdiag.record.logged import hand_to
from distdiag.record.recorder import Recorder

Given = tuple[Mapping[Any, Any], Any]
"""What a call logs, and the step that it names."""

_FIRST: Final = 512
"""So many calls of one place are written down with all their numbers, then every 16th."""
_THEN_EVERY: Final = 16
_MOST_PLACES: Final = 256
_MOST_NAMES: Final = 32
_LONGEST_NAME: Final = 80
_MOST_WAITING: Final = 64


class _Waiting(NamedTuple):
    """What was logged and may still have to be brought over from a device."""

    fields: dict[str, Any]
    values: dict[str, float]
    names: tuple[str, ...]
    pending: PendingValues | None


class LoggedNumbers(Probe):
    """Writes down what `distdiag.log` is given."""

    name: ClassVar[str] = "logged-numbers"

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._counts: dict[Hashable, int] = {}
        self._waiting: deque[_Waiting] = deque(maxlen=_MOST_WAITING)

    def _install(self) -> None:
        self._to_undo.append(hand_to(self._from_log))

    @guarded
    def flush(self) -> None:
        """Write down what is there by now."""
        self._write()

    @guarded
    def _from_log(self, values: Mapping[str, Any], step: int | None, frame: FrameType) -> None:
        self._take("distdiag.log", (values, step), frame)

    def _take(self, logger: str, given: Given, frame: FrameType) -> None:
        self._write()
        values, step = given
        numbers = {
            name[:_LONGEST_NAME]: number
            for name, value in list(values.items())[:_MOST_NAMES]
            if isinstance(name, str) and (number := _number(value)) is not None
        }
        key = (id(frame.f_code), frame.f_lasti, *numbers)
        count = self._counts.get(key, 0)
        if not numbers or (not count and len(self._counts) >= _MOST_PLACES):
            return
        self._counts[key] = count + 1
        if count >= _FIRST and count % _THEN_EVERY:
            return
        tensors = {n: v for n, v in numbers.items() if isinstance(v, torch.Tensor)}
        fields = {
            "logger": logger,
            "logged_step": step if isinstance(step, int) else -1,
            "num_updates": self.recorder.step,
            "step": self.recorder.step,
            "site": CallSite(frames_of(frame, self.recorder.main_script)) if not count else NOWHERE,
        }
        pending = PendingValues([t.reshape(1) for t in tensors.values()]) if tensors else None
        plain = {n: math.nan if n in tensors else float(v) for n, v in numbers.items()}
        self._waiting.append(_Waiting(fields, plain, tuple(tensors), pending))
        self._write()

    def _write(self) -> None:
        while self._waiting:
            fields, values, names, pending = self._waiting[0]
            found = pending.take() if pending is not None else []
            if found is None:
                return
            self._waiting.popleft()
            values.update({name: one[0] for name, one in zip(names, found, strict=True)})
            self.recorder.event(Logged, values=tuple(values.items()), **fields)


def _number(value: object) -> float | torch.Tensor | None:
    """Return a number, or a copy of the only element of a tensor, where it can be read."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and is_readable(value):
        return value.detach().reshape(()).to(torch.float64, copy=True)
    return None


# Loggers of libraries: what of a call is the step, and what the numbers.


def _of_dict(call: Mapping[str, Any]) -> Given:
    return call["data"], call.get("step")


def _of_scalar(call: Mapping[str, Any]) -> Given:
    return {call["name"]: call["value"]}, call.get("step")


def _of_scalars(call: Mapping[str, Any]) -> Given:
    return {f"{call['name']}/{key}": value for key, value in call["data"].items()}, call.get("step")


def _of_trainer(call: Mapping[str, Any]) -> Given:
    return call["data"], getattr(getattr(call["self"], "state", None), "global_step", None)


def _of_module(call: Mapping[str, Any]) -> Given:
    trainer = getattr(call["self"], "_trainer", None)
    return {call["name"]: call["value"]}, getattr(trainer, "global_step", None)


class Logger(NamedTuple):
    """A function that is given numbers by name; `parameters` are our words for its own, in order.

    `names` are its own for those that it may be given as keywords.
    """

    owner: str
    function: str
    parameters: tuple[str, ...]
    names: Mapping[str, str]
    read: Callable[[Mapping[str, Any]], Given]


_TENSORBOARD: Final = (
    Logger(
        "SummaryWriter",
        "add_scalar",
        ("self", "name", "value", "step"),
        {"tag": "name", "scalar_value": "value", "global_step": "step"},
        _of_scalar,
    ),
    Logger(
        "SummaryWriter",
        "add_scalars",
        ("self", "name", "data", "step"),
        {"main_tag": "name", "tag_scalar_dict": "data", "global_step": "step"},
        _of_scalars,
    ),
)
_LIGHTNING: Final = (Logger("LightningModule", "log", ("self", "name", "value"), {}, _of_module),)

LOGGERS: Final[Mapping[str, tuple[Logger, ...]]] = {
    "accelerate.accelerator": (
        Logger("Accelerator", "log", ("self", "data", "step"), {"values": "data"}, _of_dict),
    ),
    "lightning.pytorch.core.module": _LIGHTNING,
    "mlflow.tracking.fluent": (
        Logger("", "log_metric", ("name", "value", "step"), {"key": "name"}, _of_scalar),
        Logger("", "log_metrics", ("data", "step"), {"metrics": "data"}, _of_dict),
    ),
    "pytorch_lightning.core.module": _LIGHTNING,
    "tensorboardX.writer": _TENSORBOARD,
    "torch.utils.tensorboard.writer": _TENSORBOARD,
    "transformers.trainer": (
        Logger("Trainer", "log", ("self", "data"), {"logs": "data"}, _of_trainer),
    ),
    "wandb.sdk.wandb_run": (Logger("Run", "log", ("self", "data", "step"), {}, _of_dict),),
}
"""By the module that defines them."""


class _Inside(threading.local):
    """Whether this thread is in a logger: some hand on to others what they are given."""

    is_set = False


_INSIDE: Final = _Inside()


class LoggerCalls(LoggedNumbers):
    """Writes down what the loggers of one library are given."""

    name: ClassVar[str] = "logger-calls"

    def __init__(self, recorder: Recorder, module: str) -> None:
        """Watch the loggers that `module` defines."""
        super().__init__(recorder)
        self._module = module

    def _install(self) -> None:
        module = sys.modules[self._module]
        for logger in LOGGERS[self._module]:
            owner = getattr(module, logger.owner, None) if logger.owner else module
            self._patches.wrap(owner, logger.function, self._watching(logger))

    def _watching(self, logger: Logger) -> Callable[[AnyCallable], AnyCallable]:
        label = f"{logger.owner}.{logger.function}".lstrip(".")

        def make(original: AnyCallable) -> AnyCallable:
            @wrap_like(original)
            def log(*args: object, **kwargs: object) -> object:
                if _INSIDE.is_set or self.is_off:
                    return original(*args, **kwargs)
                _INSIDE.is_set = True
                try:
                    self._seen(label, logger, args, kwargs, sys._getframe(1))
                    return original(*args, **kwargs)
                finally:
                    _INSIDE.is_set = False

            return log

        return make

    @guarded
    def _seen(
        self,
        label: str,
        logger: Logger,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        frame: FrameType,
    ) -> None:
        call: dict[str, Untyped] = dict(zip(logger.parameters, args, strict=False))
        call |= {logger.names.get(key, key): value for key, value in kwargs.items()}
        given = self._given(logger, call)
        if given is not None:
            self._take(label, given, frame)

    def _given(self, logger: Logger, call: Mapping[str, Any]) -> Given | None:
        """Return what is logged; None where the call has another form, and will raise by itself."""
        try:
            values, step = logger.read(call)
        except (KeyError, AttributeError):
            return None
        return (values, step) if isinstance(values, Mapping) else None
