"""Observes what is loaded into models and optimizers, and what came of it when they are used."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distdiag.events.base import CallSite
from distdiag.events.checkpoints import (
    AverageSaved,
    LoadWasted,
    ScheduleRestarted,
    TrainingResumed,
    Waste,
    WeightsLoaded,
)
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.checkpoints.averages import Averages
from distdiag.probes.checkpoints.model_loads import ModelLoads, Outcome, outcome_of, refusal_of
from distdiag.probes.guard import guarded
from distdiag.probes.models.modules import Slot, clean_name, slots_of
from distdiag.probes.models.optimizer_state import parameters_of
from distdiag.probes.models.tensor_plans import address_of, local_part
from distdiag.probes.models.wrappers import unwrapped
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensors.by_identity import WeakMap, WeakMembers
from distdiag.probes.tensors.bytes import is_readable, sample
from distdiag.probes.tensors.content import Content, Pending, contents
from distdiag.probes.tensors.kinds import is_dtensor
from distdiag.probes.tensors.sample_rows import tensors_in
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

# Which parts of a checkpoint reached the optimizers before they stepped for the first time.

_MOST_FILES: Final = 8
_MOST_TENSORS: Final = 10_000
_DEEPEST: Final = 4


class _File(NamedTuple):
    addresses: frozenset[int]
    num_states: int


@dataclass(slots=True)
class _Given:
    """A state that was given to an optimizer, which need not live any more."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    kind: type
    shapes: list[tuple[int, ...]]
    num_states: int
    has_stepped: bool = False


class Resumes:
    """What was loaded into optimizers and schedulers, and what the files with weights held."""

    def __init__(self, loads: ModelLoads, roots: Callable[[], list[nn.Module]]) -> None:
        self._loads = loads
        self._roots = roots
        self._files: deque[_File] = deque(maxlen=_MOST_FILES)
        self._offered = -1
        self._restored: WeakMembers[torch.optim.Optimizer] = WeakMembers()
        self._given: list[_Given] = []
        self._schedules: WeakMap[torch.optim.Optimizer, int]
        self._schedules = WeakMap()
        self._stepped: WeakMembers[torch.optim.Optimizer] = WeakMembers()
        self._seen: WeakMap[torch.optim.Optimizer, dict[str, Any]]
        self._seen = WeakMap()
        self._num_unasked = 0
        self._left_out: WeakMap[torch.optim.Optimizer, int] = WeakMap()

    def planned(self, asked: Mapping[str, Any], keys: Iterable[str]) -> None:
        """Take note of what is asked of a distributed checkpoint that holds these keys."""
        empty = tuple(f"{path}state." for path in _stateless(asked, "", _DEEPEST))
        found = {key for key in keys if key.startswith(empty)} if empty else set()
        self._num_unasked = len({key.rpartition(".")[0] for key in found})

    def read_file(self, found: object) -> None:
        """Take note of what `torch.load` has returned."""
        states = max(_num_states(found, _DEEPEST), default=0)
        addresses = (address_of(tensor) for tensor in tensors_in(found, _DEEPEST))
        few = [address for _, address in zip(range(_MOST_TENSORS), addresses, strict=False)]
        self._files.append(_File(frozenset(few) - {None}, states))  # type: ignore[arg-type]

    def gave_weights(self, given: Mapping[str, Any]) -> None:
        """Take note of the tensors that were given to a model."""
        tensors = (each for each in given.values() if isinstance(each, torch.Tensor))
        addresses = {address_of(tensor) for tensor in tensors}
        for file in self._files:
            if not addresses.isdisjoint(file.addresses):
                self._offered = max(self._offered, file.num_states)

    def gave_state(self, optimizer: torch.optim.Optimizer, state_dict: object) -> None:
        """Take note of the state that was given to an optimizer."""
        state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
        if isinstance(state, Mapping) and not state and self._num_unasked:
            self._left_out[optimizer] = self._num_unasked
        if isinstance(state, Mapping) and state:
            self._left_out.pop(optimizer, None)
            self._restored.add(optimizer)
            of = weakref.ref(optimizer)
            self._given.append(_Given(of, type(optimizer), _shapes(optimizer), len(state)))

    def gave_schedule(self, scheduler: object) -> None:
        """Take note of a scheduler that continues where it stood."""
        optimizer = getattr(scheduler, "optimizer", None)
        step = getattr(scheduler, "last_epoch", -1)
        if isinstance(optimizer, torch.optim.Optimizer) and isinstance(step, int):
            self._schedules[optimizer] = step

    @property
    def has_restored(self) -> bool:
        """Whether the state of an optimizer was loaded, so that a training goes on."""
        return bool(self._given)

    def continues(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether an optimizer that has not stepped was given a state, and no schedule was."""
        is_new = optimizer not in self._stepped
        return is_new and optimizer in self._restored and optimizer not in self._schedules

    def has_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether `before_step` knows an optimizer."""
        return optimizer in self._stepped

    @property
    def has_seen(self) -> bool:
        """Whether `after_step` has anything to return."""
        return len(self._seen) > 0

    def before_step(self, optimizer: torch.optim.Optimizer, *, is_first: bool) -> None:
        """Look at an optimizer that has not stepped before."""
        if optimizer in self._stepped:
            return
        self._stepped.add(optimizer)
        for each in self._given:
            each.has_stepped = each.has_stepped or each.optimizer() is optimizer
        left_out = self._left_out.get(optimizer, 0)
        is_resumed = is_first and (self._loads.count or self._given or self._schedules)
        if not (is_resumed or left_out or optimizer in self._restored):
            return
        held = {id(each) for each in parameters_of(optimizer)}
        stateful = {id(key) for key in optimizer.state if isinstance(key, torch.Tensor)}
        slots = (each for root in self._roots() for each in slots_of(root))
        loaded = {id(tensor) for _, slot, tensor in slots if self._loads.wrote(slot)}
        self._seen[optimizer] = {
            "optimizer": type(optimizer).__name__,
            "num_parameters": len(held),
            "num_loaded": len(held & loaded),
            "num_stateless": len(held - stateful),
            "was_restored": optimizer in self._restored,
            "num_lost": self._num_lost(optimizer),
            "offered": self._offered,
            "schedule_step": self._schedules.get(optimizer, -1),
            "num_left_out": left_out,
        }

    def after_step(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what was seen, if this is an optimizer that keeps a state at all."""
        fields = self._seen.pop(optimizer, {})
        if not optimizer.state:
            return {}
        stateful = {id(key) for key in optimizer.state if isinstance(key, torch.Tensor)}
        num_stateless = sum(id(each) not in stateful for each in parameters_of(optimizer))
        return fields | {"num_made": fields["num_stateless"] - num_stateless} if fields else {}

    def _num_lost(self, optimizer: torch.optim.Optimizer) -> int:
        shapes = _shapes(optimizer)
        others = [
            each.num_states
            for each in self._given
            if (each.kind, each.shapes) == (type(optimizer), shapes) and self._is_idle(each)
        ]
        return max(others, default=0)

    def _is_idle(self, given: _Given) -> bool:
        optimizer = given.optimizer()
        return not given.has_stepped and (optimizer is None or optimizer not in self._stepped)


def _shapes(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in parameters_of(optimizer)]


def _stateless(value: object, path: str, depth: int) -> Iterator[str]:
    """Yield the paths of optimizers' states that hold settings alone."""
    if not isinstance(value, Mapping) or not depth:
        return
    state = value.get("state")
    if "param_groups" in value and isinstance(state, Mapping):
        if not state:
            yield path
        return
    for key, item in value.items():
        yield from _stateless(item, f"{path}{key}.", depth - 1)


def _num_states(value: object, depth: int) -> Iterator[int]:
    if not isinstance(value, Mapping) or not depth:
        return
    state = value.get("state")
    if "param_groups" in value and isinstance(state, Mapping):
        yield len(state)
        return
    for item in value.values():
        yield from _num_states(item, depth - 1)
        if isinstance(item, list | tuple):
            yield from (n for each in item for n in _num_states(each, depth - 1))


# Schedules that checkpoints hold, and those that begin anew all the same.

_MOST_SCHEDULES: Final = 32
_PROGRESS: Final = frozenset(
    ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial")
)
"""What a schedule has counted or computed; the rest of its state are its settings."""
_RATES: Final = "base_lrs"


class Schedules:
    """The states of schedules that were read, and the schedule that each optimizer has."""

    def __init__(self) -> None:
        self._read: deque[Mapping[str, Any]] = deque(maxlen=_MOST_SCHEDULES)
        self._made: WeakMap[torch.optim.Optimizer, weakref.ref[Any]] = WeakMap()

    def made(self, scheduler: object) -> None:
        """Take note of a new schedule."""
        optimizer = getattr(scheduler, "optimizer", None)
        if isinstance(optimizer, torch.optim.Optimizer):
            self._made[optimizer] = weakref.ref(scheduler)

    def read(self, found: object) -> None:
        """Take note of what a checkpoint holds."""
        self._read += (dict(each) for each in _schedules_in(found, _DEEPEST))

    def restarted(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the fields of the event, if the schedule is at its beginning and one was read."""
        reference = self._made.get(optimizer)
        scheduler = None if reference is None else reference()
        if scheduler is None or getattr(scheduler, "last_epoch", None) != 0:
            return {}
        mine = {key: value for key, value in vars(scheduler).items() if key != "optimizer"}
        for state in reversed(self._read):
            settings = {key: value for key, value in state.items() if key not in _PROGRESS}
            is_alike = settings.keys() == mine.keys() - _PROGRESS  # else it is one of another class
            if is_alike and all(_is_same(mine[key], value) for key, value in settings.items()):
                return {
                    "optimizer": type(optimizer).__name__,
                    "schedule": type(scheduler).__name__,
                    "saved_step": state["last_epoch"],
                    "same": tuple(sorted(settings.keys() - {_RATES, *_functions(settings)})),
                }
        return {}


def _schedules_in(value: object, depth: int) -> Iterator[Mapping[str, Any]]:
    if not depth or not isinstance(value, Mapping | list | tuple):
        return
    if isinstance(value, Mapping) and _RATES in value:
        step = value.get("last_epoch")
        if type(step) is int and step > 0:
            yield value
        return
    for item in value.values() if isinstance(value, Mapping) else value:
        yield from _schedules_in(item, depth - 1)


def _is_same(mine: object, saved: object) -> bool:
    """Compare plain settings; functions are not saved, and others have no meaning here."""
    plain = (bool, int, float, str)
    if isinstance(mine, list | tuple) and isinstance(saved, list | tuple):
        return len(mine) == len(saved) and all(map(_is_same, mine, saved))
    return mine == saved if isinstance(mine, plain) and isinstance(saved, plain) else True


def _functions(settings: Mapping[str, object]) -> Iterator[str]:
    """Yield the settings that are not numbers or texts, nor lists of them."""
    for key, value in settings.items():
        items = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(each, bool | int | float | str) for each in items):
            yield key


# Loads that come to nothing: read beside the model, or written over before training begins.

_MOST_COMPARED: Final = 6
_MOST_BYTES: Final = 1 << 26
_LEAST_ELEMENTS: Final = 16
_MOST_VALUES: Final = 1024
_UNLIKE: Final = 0.6
"""The correlation of values below which they have nothing in common."""


@dataclass(slots=True)
class _Read:
    """A tensor that was read for a place in a model, and what the model held then."""

    name: str
    slot: Slot
    given: Pending
    held: Pending


@dataclass(slots=True)
class _Written:
    name: str
    slot: Slot
    values: torch.Tensor


@dataclass(slots=True)
class _Watched:
    module: weakref.ref[nn.Module]
    api: str
    waste: Waste
    tensors: Sequence[_Read | _Written]
    count: int
    site: CallSite


class WastedLoads:
    """What was loaded before training began, until it is seen whether the models hold it."""

    def __init__(self, loads: ModelLoads, roots: Callable[[], list[nn.Module]]) -> None:
        """Know of no load; `roots` are the models that there are."""
        self._loads = loads
        self._roots = roots
        self._watched: list[_Watched] = []

    def wrote(self, module: nn.Module, site: CallSite) -> None:
        """Remember some of what a load has just put into a module."""
        found = [
            each
            for each in slots_of(module)
            if self._loads.wrote(each[1], self._loads.count - 1) and _has_values(each[2])
        ]
        tensors = [
            _Written(name, slot, values)
            for name, slot, tensor in _spread(found)
            if _varies(values := _values(tensor))
        ]
        self._watched = [each for each in self._watched if each.module() is not module]
        self._watch(module, "load_state_dict", Waste.OVERWRITTEN, tensors, site)

    def read(self, api: str, state_dict: Mapping[str, Any], site: CallSite) -> None:
        """Take note of tensors that were read into a state dict."""
        leaves = [(clean_name(name), each) for name, each in _tensors_of(state_dict, "", 6)]
        addresses = {address_of(local_part(tensor)) for _, tensor in leaves} - {None}
        for root in self._roots():
            places = {clean_name(n): (slot, t) for n, slot, t in slots_of(root)}
            inside = [s for s, t in places.values() if address_of(local_part(t)) in addresses]
            if inside:
                self._loads.mark(inside)  # it was read right into the model
                continue
            found = [(name, *places[name], t) for name, t in _placed(leaves, places)]
            tensors = [
                _Read(name, slot, _reading(_part_like(given, held)), _reading(held))
                for name, slot, held, given in _spread(found)
            ]
            self._watch(root, api, Waste.UNUSED, tensors, site)

    def _watch(
        self,
        module: nn.Module,
        api: str,
        waste: Waste,
        tensors: Sequence[_Read | _Written],
        site: CallSite,
    ) -> None:
        if len(tensors) > 1:
            reference = weakref.ref(module)
            self._watched.append(_Watched(reference, api, waste, tensors, self._loads.count, site))

    @property
    def is_watching(self) -> bool:
        """Whether there is anything to settle."""
        return bool(self._watched)

    def settle(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], CallSite]]:
        """Yield what has come to nothing, of models that an optimizer is about to change."""
        rest, held = [], {id(parameter) for parameter in parameters_of(optimizer)}
        for each in self._watched:
            module = each.module()
            if module is None:
                continue
            if not any(id(parameter) in held for parameter in module.parameters()):
                rest.append(each)
            elif all(self._is_wasted(tensor, each.count) for tensor in each.tensors):
                fields = {
                    "api": each.api,
                    "waste": each.waste,
                    "target": type(unwrapped(module)).__name__,
                    "names": tuple(clean_name(tensor.name) for tensor in each.tensors),
                    "num_compared": len(each.tensors),
                }
                yield fields, each.site
        self._watched = rest

    def _is_wasted(self, tensor: _Read | _Written, count: int) -> bool:
        now = tensor.slot.tensor()
        if now is None or self._loads.wrote(tensor.slot, count):
            return False
        if isinstance(tensor, _Written):
            return _has_values(now) and _are_unlike(tensor.values, _values(now))
        current, given, held = (_taken(e) for e in (_reading(now), tensor.given, tensor.held))
        if current is None or given is None or held is None:
            return False
        return current.digest == held.digest and _differ(current, given)


def _placed(
    leaves: Sequence[tuple[str, torch.Tensor]], places: Mapping[str, tuple[Slot, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what has the name, below some prefix, and the shape of a tensor of the model."""
    for path, tensor in leaves:
        parts = path.split(".")
        names = (".".join(parts[start:]) for start in range(len(parts)))
        name = next((name for name in names if name in places), None)
        if name is not None:
            wanted = places[name][1]
            if (wanted.shape, wanted.dtype) == (tensor.shape, tensor.dtype):
                yield name, tensor


def _tensors_of(value: object, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_of(item, f"{path}.{key}" if path else str(key), depth - 1)


def _spread(found: Sequence[Any]) -> list[Any]:
    """Choose a few, from the first one to the last one."""
    step = max(1, math.ceil(len(found) / _MOST_COMPARED))
    return list(found[::step])


def _part_like(given: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return of a whole tensor the part that this rank holds of a sharded one."""
    if is_dtensor(given) or not is_dtensor(held):
        return given
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = held
    shape, offset = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    places = zip(offset, shape, strict=True)
    with out_of_sight():
        return given[tuple(slice(start, start + size) for start, size in places)]


def _reading(tensor: torch.Tensor) -> Pending:
    local = local_part(tensor)
    pending = contents([local] if local.nbytes <= _MOST_BYTES else [])
    pending.guard()
    return pending


def _taken(pending: Pending) -> Content | None:
    found = pending.take()
    return found[0] if found else None


def _differ(one: Content, other: Content) -> bool:
    return one.digest[0] == other.digest[0] and one.digest != other.digest


def _has_values(tensor: torch.Tensor) -> bool:
    """Say whether values can be read at once."""
    local = local_part(tensor)
    is_number = local.is_floating_point() and local.device.type == "cpu"
    return is_number and local.numel() >= _LEAST_ELEMENTS and is_readable(local)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    with out_of_sight():
        return sample(local_part(tensor).detach())[:_MOST_VALUES].to(torch.float64, copy=True)


def _varies(values: torch.Tensor) -> bool:
    with out_of_sight():
        return bool(values.isfinite().all()) and float(values.std()) > 0


def _are_unlike(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape or not _varies(after):
        return False
    with out_of_sight():
        one, other = before - before.mean(), after - after.mean()
        return abs(float(one.dot(other) / (one.norm() * other.norm()))) < _UNLIKE


# The probe.


class _Inside(threading.local):
    depth = 0


class LoadProbe(Probe):
    """Writes down what loads have left out or lost, when the next optimizer step begins."""

    name: ClassVar[str] = "loads"

    def __init__(
        self,
        recorder: Recorder,
        state_read: Signal[Any, FrameType],
        load_planned: Signal[object, object],
        models: Callable[[], list[nn.Module]],
    ) -> None:
        """Know of no load yet; `models` returns those that there are.

        `load_planned` gets what is asked of a distributed checkpoint, and its metadata.
        """
        super().__init__(recorder)
        self._state_read = state_read
        self._load_planned = load_planned
        self._loads = ModelLoads()
        self._wasted = WastedLoads(self._loads, models)
        self._resumes = Resumes(self._loads, models)
        self._schedules = Schedules()
        self._averages = Averages()
        self._inside = _Inside()
        self._num_settled = 0

    def _install(self) -> None:
        self._patches.wrap(nn.Module, "load_state_dict", self._around_load)
        optimizer = torch.optim.Optimizer
        self._tell_after(optimizer, self._restored)
        for kind in list(vars(lr_scheduler).values()):
            is_kind = isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
            if is_kind and "load_state_dict" in vars(kind):
                self._tell_after(kind, self._scheduled)
        made = self._call_after(self._made)
        self._patches.wrap(lr_scheduler.LRScheduler, "__init__", made)
        self._patches.wrap_everywhere(torch.serialization, "load", self._call_after(self._opened))
        self._patches.wrap_everywhere(torch.serialization, "save", self._call_after(self._saved))
        self._subscribe(self._state_read, self._read)
        self._subscribe(self._load_planned, self._planned)
        self._to_undo.append(register_optimizer_step_pre_hook(self._before_step).remove)
        self._to_undo.append(register_optimizer_step_post_hook(self._after_step).remove)

    def _site(self, frame: FrameType) -> CallSite:
        return CallSite(frames_of(frame, self.recorder.main_script))

    # What is loaded

    def _around_load(self, original: AnyCallable) -> AnyCallable:
        inside = self._inside

        @wrap_like(original)
        def load_state_dict(*args: object, **kwargs: object) -> object:
            if self.is_off or inside.depth or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            inside.depth += 1
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self._loaded(args, kwargs, refusal_of(error), sys._getframe())
                raise
            finally:
                inside.depth -= 1
            self._loaded(args, kwargs, outcome_of(result), sys._getframe())
            return result

        return load_state_dict

    @guarded
    def _loaded(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outcome: Outcome | None,
        frame: FrameType,
    ) -> None:
        module, given = _arguments(*args, **kwargs)
        if outcome is None or not isinstance(given, Mapping):
            return
        self._loads.add(module, given, outcome, self.recorder.step, self._site(frame))
        self._resumes.gave_weights(given)
        self._averages.gave(given)
        if self.recorder.step == 0:
            self._wasted.wrote(module, self._site(frame))

    def _tell_after(self, kind: type, tell: Callable[..., None]) -> None:
        after = self._call_after(lambda _, *args, **kwargs: tell(*_arguments(*args, **kwargs)))
        self._patches.wrap(kind, "load_state_dict", after)

    @guarded
    def _restored(self, optimizer: torch.optim.Optimizer, state_dict: object) -> None:
        self._resumes.gave_state(optimizer, state_dict)

    @guarded
    def _planned(self, asked: object, metadata: object) -> None:
        keys = getattr(metadata, "state_dict_metadata", None)
        if isinstance(asked, Mapping) and isinstance(keys, Mapping):
            self._resumes.planned(asked, keys)

    @guarded
    def _scheduled(self, scheduler: object, _: object) -> None:
        self._resumes.gave_schedule(scheduler)

    @guarded
    def _made(self, _: object, scheduler: object, /, *__: object, **___: object) -> None:
        self._schedules.made(scheduler)

    @guarded
    def _opened(self, found: object, /, *_: object, **__: object) -> None:
        self._resumes.read_file(found)
        self._schedules.read(found)
        if self.recorder.step == 0:
            self._averages.read(found, self._site(sys._getframe(1)))

    @guarded
    def _saved(self, _: object, state: object = None, /, *__: object, **___: object) -> None:
        if self.recorder.step and self._resumes.has_restored:
            self._averages.saved(state)
            self._write_averages()

    def _write_averages(self) -> None:
        for fields in self._averages.settle():
            self.recorder.event(AverageSaved, **fields._asdict())

    @guarded
    def flush(self) -> None:
        """Write down what a device has read by now."""
        self._write_averages()

    @guarded
    def _read(self, state_dict: Mapping[str, Any], frame: FrameType) -> None:
        self._schedules.read(state_dict)
        if self.recorder.step == 0:
            api = "torch.distributed.checkpoint.load"
            self._wasted.read(api, state_dict, self._site(frame))

    # What came of it

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self.recorder.num_backwards:
            return  # not a step of the training: it makes the states of the optimizer
        is_first = not self._resumes.has_stepped(optimizer)
        if is_first or self._loads.is_unsettled or self._wasted.is_watching:
            self._settle(optimizer)

    @guarded
    def _settle(self, optimizer: torch.optim.Optimizer) -> None:
        for fields, site in self._loads.settle():
            self.recorder.event(WeightsLoaded, site=site, **fields)
        for fields, site in self._wasted.settle(optimizer):
            self.recorder.event(LoadWasted, site=site, **fields)
        restarted = self._resumes.continues(optimizer) and self._schedules.restarted(optimizer)
        if restarted:
            site = self._site(sys._getframe(1))
            self.recorder.event(ScheduleRestarted, site=site, **restarted)
        self._resumes.before_step(optimizer, is_first=self.recorder.step == 0)
        self._averages.start()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._resumes.has_seen:
            self._tell_resumed(optimizer)

    @guarded
    def _tell_resumed(self, optimizer: torch.optim.Optimizer) -> None:
        fields = self._resumes.after_step(optimizer)
        if fields:
            site = self._site(sys._getframe(1))
            self.recorder.event(TrainingResumed, site=site, **fields)


def _arguments(
    self: object,
    state_dict: object = None,
    *_: object,
    **__: object,
) -> tuple[Any, object]:
    return self, state_dict
