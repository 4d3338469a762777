"""What models that ranks train together are given, from batch to backward pass."""

from __future__ import annotations

import itertools
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.events.base import CallSite
from distdiag.events.data import Draw, ModelFed, NormStatistics
from distdiag.probes.base import AnyCallable, Probe, like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guarded
from distdiag.probes.losses.terms import kind_of, saved
from distdiag.probes.models.modules import clean_name
from distdiag.probes.models.tensor_plans import address_of
from distdiag.probes.models.wrappers import unwrapped, wrapper_of
from distdiag.probes.out_of_sight import is_grad_enabled, out_of_sight
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.content import Pending, contents
from distdiag.probes.tensors.sample_rows import first_tensors, tensors_in
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

# What batch normalisation took for the mean and variance of a batch, read where it is saved.
#
# The graph of a model's output holds the statistics by which its layers have normalised. No module
# is hooked for that, and nothing is computed.

MOST_NODES: Final = 5000
MOST_LAYERS: Final = 8
MOST_CHANNELS: Final = 4

_NORMS: Final = frozenset({"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"})


def local_norms(root: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of torch's plain batch normalisation that are neither frozen nor shared."""
    kind = nn.modules.batchnorm._BatchNorm
    return {
        clean_name(name): module
        for name, module in root.named_modules()
        if isinstance(module, kind) and type(module).forward is kind.forward and module.training
    }


class _Layer(NamedTuple):
    """One layer in the graph: for some channels the mean, and one over the deviation."""

    name: str
    num_samples: int
    num_values: int
    num_channels: int
    means: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor]
    epsilon: float


class NormReading:
    """The statistics of the layers of one forward pass, which a device may still be bringing."""

    def __init__(self, output: object, layers: dict[str, nn.Module]) -> None:
        with out_of_sight():
            found = list(itertools.islice(_layers_of(output, layers), MOST_LAYERS))
            self._pending = contents([t for each in found for t in (*each.means, *each.scales)])
        # A device reads what it needs; the graph may go.
        self._layers = [each._replace(means=(), scales=()) for each in found]

    def take(self) -> tuple[NormStatistics, ...] | None:
        """Return the statistics, None if they are not there yet."""
        found = self._pending.take()
        if found is None:
            return None
        values = [math.nan if each is None else each.mean for each in found]
        feeds, place = [], 0
        for each in self._layers:
            width = each.num_channels
            means = values[place : place + width]
            scales = values[place + width : place + 2 * width]
            place += 2 * width
            variances = [1 / scale**2 - each.epsilon if scale else math.nan for scale in scales]
            if all(map(math.isfinite, (*means, *variances))):
                feeds.append(
                    NormStatistics(
                        each.name,
                        each.num_samples,
                        each.num_values,
                        tuple(means),
                        tuple(max(value, 0.0) for value in variances),
                    )
                )
        return tuple(feeds)


def _layers_of(output: object, layers: dict[str, nn.Module]) -> Iterator[_Layer]:
    kept = {name: module.running_mean for name, module in layers.items()}
    names = {address_of(t): name for name, t in kept.items() if isinstance(t, torch.Tensor)}
    for node in _nodes_below(output):
        if kind_of(node)[0] in _NORMS and node._saved_training:
            mean, scale = saved(node, "result1"), saved(node, "result2")
            running, given = saved(node, "running_mean"), saved(node, "input")
            if mean is None or scale is None or running is None or given is None:
                continue
            name = names.get(address_of(running))
            if name is not None and given.numel():
                num_values = given.numel() // mean.numel()
                shown = range(0, mean.numel(), -(-mean.numel() // MOST_CHANNELS))
                parts = [[each[channel] for channel in shown] for each in (mean, scale)]
                sizes = given.shape[0], num_values, len(shown)
                yield _Layer(name, *sizes, parts[0], parts[1], _epsilon(node))


def _epsilon(node: Untyped) -> float:
    found = getattr(node, "_saved_eps", None)
    return float(node._saved_epsilon if found is None else found)


def _nodes_below(output: object) -> Iterator[Any]:
    waiting = deque(t.grad_fn for t in tensors_in(output) if t.grad_fn is not None)
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.popleft()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [child for child, _ in node.next_functions if child is not None]


# Follows what a model is given, from the batch to its backward pass.

_FIRST: Final = 6
_EVERY: Final = 100
_MOST_DRAWS: Final = 16


class Batch(NamedTuple):
    """The last batch that came from a data loader."""

    stream: str = ""
    digest: str = ""
    size: int = 0
    num_samples: int = -1
    contents: Pending | None = None
    since: int = -1


@dataclass(slots=True)
class _Fed:
    """What a model was given, until a backward pass shows that it is trained on it."""

    model: str
    members: tuple[int, ...]
    contents: Pending
    batch_sizes: tuple[int, ...]
    norm_layers: dict[str, nn.Module]
    begin: int
    site: CallSite
    norms: NormReading | None = None


_Waiting = tuple[Pending, Pending | None, NormReading | None, dict[str, Any]]


class Moments(NamedTuple):
    """When to look, as `Signals` says; `inputs_seen` gets batches and inputs."""

    forward_started: Signal[object, nn.Module, object]
    forward_ended: Signal[object, object]
    before_backward: Signal[[]]
    step_ended: Signal[[]]
    inputs_seen: Signal[object]


class StepFeeds(Probe):
    """Writes down inputs, random draws and batches of some backward passes."""

    name: ClassVar[str] = "step-feeds"

    def __init__(self, recorder: Recorder, moments: Moments) -> None:
        super().__init__(recorder)
        self._moments = moments
        self.members: tuple[int, ...] = ()
        """The ranks that train the model together which was fed last."""
        self._batch = Batch()
        self._fed: _Fed | None = None
        self._draws: list[Draw] = []
        self._inside: object = None
        """What tells the forward pass of a wrapped model that goes on, None between them."""
        self._names: WeakMap[nn.Module, tuple[str, tuple[int, ...]]] = WeakMap()
        self._counts: dict[str, int] = {}
        self._last, self._is_fed = "", False
        self._num_passes: dict[str, int] = {}
        self._waiting: deque[_Waiting] = deque()

    def _install(self) -> None:
        kind = DistributedDataParallel
        for name, around in (
            ("_pre_forward", self._before_forward),
            ("_post_forward", self._after_forward),
        ):
            self._patches.wrap(kind, name, around)
        self._subscribe(self._moments.forward_started, self.enter)
        self._subscribe(self._moments.forward_ended, self.leave)
        self._subscribe(self._moments.before_backward, self._before_backward)
        self._subscribe(self._moments.step_ended, self._write)

    def flush(self) -> None:
        """Write down what has been read by now."""
        self._write()

    @property
    def is_inside(self) -> bool:
        """Whether a wrapped model is in its forward pass."""
        return self._inside is not None

    # Models. Without the mark that other wrappers bear: DDP may be compiled as a whole.

    def _before_forward(self, original: AnyCallable) -> AnyCallable:
        number = len(_FEEDS)
        _FEEDS.append(self)

        @like(original)
        def pre_forward(self_: Untyped, *args: Untyped, **kwargs: Untyped) -> Untyped:
            if not torch.compiler.is_compiling():
                _FEEDS[number].enter(self_, self_, (args, kwargs))
            return original(self_, *args, **kwargs)

        return pre_forward

    def _after_forward(self, original: AnyCallable) -> AnyCallable:
        number = len(_FEEDS)
        _FEEDS.append(self)

        @like(original)
        def post_forward(self_: object, *args: object, **kwargs: object) -> object:
            if not torch.compiler.is_compiling():
                _FEEDS[number].leave(self_, (args, kwargs))
            return original(self_, *args, **kwargs)

        return post_forward

    def enter(self, forward: object, module: nn.Module, given: object) -> None:
        """Take note that a wrapped model is given its inputs, unless it is part of another one."""
        if self._inside is None:
            self._inside = forward
            self._enter_forward(module, given)

    def leave(self, forward: object, output: object) -> None:
        """Take note that this forward pass of a wrapped model is over."""
        if self._inside is forward:
            self._inside = None
            self._leave_forward(output)

    @guarded
    def _leave_forward(self, output: object) -> None:
        fed = self._fed
        if fed is not None and fed.norms is None and fed.norm_layers:
            fed.norms = NormReading(output, fed.norm_layers)

    @guarded
    def _enter_forward(self, module: nn.Module, given: object) -> None:
        if not (is_grad_enabled() and module.training and dist.is_initialized()):
            return
        self._moments.inputs_seen.emit(given)
        model, self.members = self._name(module)
        if self._is_fed:
            return  # the pass is known by the model that was fed first
        self._last, self._is_fed = model, True
        if not self._is_due:
            return
        tensors, pending = first_tensors(given), self._read(given)
        frames = frames_of(sys._getframe(2), self.recorder.main_script)
        sizes = tuple(dict.fromkeys(tensor.shape[0] for tensor in tensors))
        begin = self.recorder.num_events
        norms = local_norms(unwrapped(module))
        self._fed = _Fed(model, self.members, pending, sizes, norms, begin, CallSite(frames))

    @staticmethod
    def _read(given: object) -> Pending:
        pending = contents(first_tensors(given))
        pending.guard()
        return pending

    def _name(self, module: nn.Module) -> tuple[str, tuple[int, ...]]:
        known = self._names.get(module)
        if known is None:
            wrapper = wrapper_of(module, "")
            kind, ranks = (wrapper.kind, wrapper.ranks) if wrapper is not None else ("", ())
            name = f"{kind} {type(unwrapped(module)).__name__.removeprefix('FSDP')}".strip()
            number = self._counts[name] = self._counts.get(name, 0) + 1
            known = (name if number == 1 else f"{name}#{number}", ranks)
            self._names[module] = known
        return known

    # Batches and draws

    def after_batch(self, batch: Batch, given: object) -> None:
        """Take note of a batch; what was drawn before belongs to another one."""
        if batch.digest and not self.is_off and self._is_due:
            batch = batch._replace(contents=self._read(given), since=self.recorder.num_events)
        self._batch = batch
        self._draws.clear()
        self._moments.inputs_seen.emit(given)

    @property
    def wants_draws(self) -> bool:
        """Whether it matters now what the program draws."""
        # What is drawn before the first pass may be weights or the data themselves.
        return self._number > 0 and not self.is_off and self._is_due and self._has_room

    @property
    def _has_room(self) -> bool:
        return len(self._draws) < _MOST_DRAWS

    def add_draw(self, draw: Draw) -> None:
        """Take note of random numbers that were drawn."""
        self._draws.append(draw)

    @property
    def _number(self) -> int:
        """How many passes the model has had that is or was fed; all, if none has been fed yet."""
        if not self._last:
            return self.recorder.num_backwards
        return self._num_passes.get(self._last, 0)

    @property
    def _is_due(self) -> bool:
        return self._number < _FIRST or self._number % _EVERY < 2

    # Backward passes

    def _before_backward(self) -> None:
        self._inside = None  # whatever became of it
        self._backward()

    @guarded
    def _backward(self) -> None:
        self._write()
        fed, self._fed = self._fed, None
        number = self._number
        if self._is_fed:
            self._is_fed, self._num_passes[self._last] = False, number + 1
        draws, self._draws = tuple(self._draws), []
        if fed is None:
            return
        batch = self._batch
        fields = {
            "model": fed.model,
            "number": number,
            "members": fed.members,
            "batch_sizes": fed.batch_sizes,
            "stream": batch.stream,
            "batch": batch.digest,
            "num_batch": batch.size,
            "num_samples": batch.num_samples,
            "num_local_norms": len(fed.norm_layers),
            "draws": draws,
            "begin": fed.begin,
            "end": self.recorder.num_events,
            "since": batch.since,
            "site": fed.site,
        }
        self._waiting.append((fed.contents, batch.contents, fed.norms, fields))
        self._write()

    @guarded
    def _write(self) -> None:
        while self._waiting:
            inputs, batch, reading, fields = self._waiting[0]
            found = inputs.take(), [] if batch is None else batch.take()
            norms = () if reading is None else reading.take()
            if found[0] is None or found[1] is None or norms is None:
                return
            self._waiting.popleft()
            given, samples = (_digests(each) for each in found if each is not None)
            self.recorder.event(ModelFed, inputs=given, samples=samples, norms=norms, **fields)


def _digests(found: Sequence[Any]) -> tuple[str, ...]:
    return tuple("" if each is None else each.digest for each in found)


_FEEDS: Final[list[StepFeeds]] = []
"""Who is notified of forward passes; a traced function may hold a list, but not a probe."""
