"""What models that ranks train together are given, from batch to backward pass."""

from __future__ import annotations

import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.events.base import CallSite
from distdiag.events.data import Draw, ModelFed, NormStatistics
from distdiag.events.models import ObjectKind
from distdiag.events.random import GeneratorState
from distdiag.probes.base import AnyCallable, Probe, like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.creations import Creations
from distdiag.probes.generators import generator_states
from distdiag.probes.guard import guard, guarded, guarded_if
from distdiag.probes.losses.terms import kind_of, saved
from distdiag.probes.models.modules import ModuleHook, class_name, clean_name, is_compiled
from distdiag.probes.models.tensor_plans import address_of
from distdiag.probes.models.wrappers import is_training, is_wrapped, unwrapped, wrapper_of
from distdiag.probes.out_of_sight import is_grad_enabled, out_of_sight
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.content import Pending, contents
from distdiag.probes.tensors.kinds import is_dtensor
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
    has_drawn: bool
    norms: NormReading | None = None


@dataclass(slots=True)
class _Waiting:
    """A pass of which a device may still be bringing what was read, and all else of its event."""

    inputs: Pending
    batch: Pending | None
    norms: NormReading | None
    draws: list[tuple[Draw, Pending | None]]
    fields: dict[str, Any]

    def event_fields(self) -> dict[str, Any] | None:
        """Return what to write, None if it is not there yet."""
        inputs, batch = self.inputs.take(), [] if self.batch is None else self.batch.take()
        norms = () if self.norms is None else self.norms.take()
        draws = [(draw, [] if each is None else each.take()) for draw, each in self.draws]
        if inputs is None or batch is None or norms is None or any(a is None for _, a in draws):
            return None
        known = (
            msgspec.structs.replace(draw, activation=_digests(found)[0]) if found else draw
            for draw, found in draws
        )
        given = [each for each in inputs if each is None or each.least != each.greatest]
        parts = {"inputs": _digests(given), "samples": _digests(batch), "norms": norms}
        return self.fields | parts | {"draws": tuple(known)}


class Moments(NamedTuple):
    """When to look, as `Signals` says; `inputs_seen` gets batches and inputs."""

    model_wrapped: Signal[Sequence[nn.Module]]
    model_started: Signal[nn.Module]
    forward_started: Signal[object, nn.Module, object]
    forward_ended: Signal[object, object]
    evaluated: Signal[nn.Module]
    before_backward: Signal[[]]
    step_ended: Signal[[]]
    inputs_seen: Signal[object]


class StepFeeds(Probe):
    """Writes down inputs, random draws and batches of some backward passes."""

    name: ClassVar[str] = "step-feeds"

    def __init__(
        self,
        recorder: Recorder,
        moments: Moments,
        roots: Callable[[], Iterable[nn.Module]],
        creations: Creations,
    ) -> None:
        """Know of no model yet; `roots` are those that there are."""
        super().__init__(recorder)
        self._creations = creations
        self._moments = moments
        self._roots = roots
        self._is_changed = False
        """Whether models were sharded since the last batch."""
        self.members: tuple[int, ...] = ()
        """The ranks that train the model together which was fed last."""
        self._batch = Batch()
        self.fed: _Fed | None = None
        """What a model was given in a pass that is looked at."""
        self._draws: list[tuple[Draw, Pending | None]] = []
        self._inside: object = None
        """What tells the forward pass of a model that goes on, None between them."""
        self._num_masks = 0
        self._parts: dict[int, str] = {}
        """The modules of that model by id: name and class."""
        self._bare: WeakMap[nn.Module, tuple[Any, Any]] = WeakMap()
        """The hooks of models that nothing wraps."""
        self._seeded: CallSite | None = None
        self._drawn_until: tuple[GeneratorState, ...] = ()
        """The generators after the last pass that was looked at."""
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
        seeding = self._call_before(self._before_seed)
        self._patches.wrap_everywhere(torch, "manual_seed", seeding)
        self._subscribe(self._moments.model_wrapped, self._after_wrap)
        self._subscribe(self._moments.model_started, self._start)
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
                _FEEDS[number].tell_started(self_, (args, kwargs))
            return original(self_, *args, **kwargs)

        return pre_forward

    def _after_forward(self, original: AnyCallable) -> AnyCallable:
        number = len(_FEEDS)
        _FEEDS.append(self)

        @like(original)
        def post_forward(self_: object, *args: object, **kwargs: object) -> object:
            if not torch.compiler.is_compiling():
                _FEEDS[number].tell_ended(self_, (args, kwargs))
            return original(self_, *args, **kwargs)

        return post_forward

    def tell_started(self, module: nn.Module, given: object) -> None:
        """Tell all who want to know that DDP is given its inputs."""
        with guard(self.fail):  # one for all who are told
            self._moments.forward_started.emit(module, module, given)

    def tell_ended(self, module: object, output: object) -> None:
        """Tell them that its forward pass is over."""
        with guard(self.fail):
            self._moments.forward_ended.emit(module, output)

    def _after_wrap(self, _: object) -> None:
        self._is_changed = True

    @guarded
    def _start_sharded(self) -> None:
        """Look at the first pass, too, of models that tensor parallelism has sharded by now."""
        self._is_changed = False
        for root in self._roots():
            if any(is_dtensor(parameter) for parameter in root.parameters()):
                self._start(root)

    @guarded
    def _start(self, root: nn.Module) -> None:
        """Look at some passes of a model that nothing wraps: whose it is, reductions tell."""
        is_closed = isinstance(root, torch.jit.ScriptModule) or is_compiled(root)
        if is_closed or root in self._bare or is_wrapped(root):
            return
        if any(parameter.requires_grad for parameter in root.parameters()):

            def before(module: nn.Module, args: object, kwargs: object) -> None:
                self.enter(module, module, (args, kwargs))

            def after(module: nn.Module, _: object, output: object) -> None:
                self.leave(module, output)
                self._let_go(module)

            self._bare[root] = (
                root.register_forward_pre_hook(ModuleHook(before), with_kwargs=True),
                root.register_forward_hook(ModuleHook(after)),
            )

    @guarded
    def _let_go(self, root: nn.Module) -> None:
        if self._num_passes.get(self._name(root)[0], 0) >= _FIRST:
            for hook in self._bare.get(root, ()):
                hook.remove()

    def uninstall(self) -> None:
        """Take the hooks away again."""
        for root in list(self._bare):
            for hook in self._bare[root]:
                hook.remove()
        super().uninstall()

    def enter(self, forward: object, module: nn.Module, given: object) -> None:
        """Take note that a model is given its inputs, unless it is part of another one."""
        if self._inside is None:
            self._inside = forward
            self._enter_forward(module, given)

    def leave(self, forward: object, output: object) -> None:
        """Take note that this forward pass of a model is over."""
        if self._inside is forward:
            self._inside = None
            self._leave_forward(output)
            if isinstance(forward, nn.Module) and not is_training(forward):
                self._moments.evaluated.emit(forward)

    @guarded_if("fed")
    def _leave_forward(self, output: object) -> None:
        fed = self.fed
        if fed is not None and fed.norms is None and fed.norm_layers:
            fed.norms = NormReading(output, fed.norm_layers)

    @guarded
    def _enter_forward(self, module: nn.Module, given: object) -> None:
        if not (is_grad_enabled() and is_training(module) and dist.is_initialized()):
            return
        model, members = self._name(module)
        if module not in self._bare:
            self._moments.inputs_seen.emit(given)
            self.members = members
        self._parts, self._num_masks = {}, 0
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
        has_drawn = bool(self._drawn_until) and self._drawn_until != tuple(generator_states())
        site = CallSite(frames)
        self.fed = _Fed(model, members, pending, sizes, norms, begin, site, has_drawn)
        parts = unwrapped(module).named_modules()
        self._parts = {id(p): f"{clean_name(name)} {class_name(p)}".strip() for name, p in parts}

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
            name = f"{kind} {class_name(unwrapped(module))}".strip()
            number = self._counts[name] = self._counts.get(name, 0) + 1
            known = (name if number == 1 else f"{name}#{number}", ranks)
            self._names[module] = known
            self._creations.tell(ObjectKind.MODEL, known[0], unwrapped(module), module)
        return known

    # Batches and draws

    def after_batch(self, batch: Batch, given: object) -> None:
        """Take note of a batch; what was drawn before belongs to another one."""
        if batch.digest and not self.is_off and self._is_due:
            batch = batch._replace(contents=self._read(given), since=self.recorder.num_events)
        if self._is_changed and not self.is_off:
            self._start_sharded()
        self._batch = batch
        self._draws.clear()
        self._moments.inputs_seen.emit(given)

    @property
    def wants_draws(self) -> bool:
        """Whether it matters now what the program draws."""
        # What is drawn before the first pass may be weights or the data themselves.
        return self._number > 0 and not self.is_off and self._is_due and self._has_room

    @property
    def wants_masks(self) -> bool:
        """Whether it matters now what is drawn for activations; asked for each that may be."""
        if self.fed is None or self._inside is None or self.is_off:
            return False
        if not (self._is_due and self._has_room):
            return False
        self._num_masks += 1
        return self._num_masks <= _MOST_DRAWS

    @property
    def _has_room(self) -> bool:
        return len(self._draws) < _MOST_DRAWS

    def name_of(self, module: object) -> str:
        """Return name and class of a part of the model that is in its forward pass."""
        return self._parts.get(id(module), "")

    def add_draw(self, draw: Draw, activation: Pending | None = None) -> None:
        """Take note of random numbers that were drawn, and what for."""
        self._draws.append((draw, activation))

    @guarded
    def _before_seed(self, /, *_: object, **__: object) -> None:
        self._seeded = CallSite(frames_of(sys._getframe(1), self.recorder.main_script))

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
        fed, self.fed = self.fed, None
        number = self._number
        if self._is_fed:
            self._is_fed, self._num_passes[self._last] = False, number + 1
        draws, self._draws = self._draws, []
        self._drawn_until = () if fed is None else tuple(generator_states())
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
            "seeded": self._seeded,
            "begin": fed.begin,
            "end": self.recorder.num_events,
            "since": batch.since,
            "site": fed.site,
            "has_drawn": fed.has_drawn,
        }
        self._waiting.append(_Waiting(fed.contents, batch.contents, fed.norms, draws, fields))
        self._write()

    @guarded_if("_waiting")
    def _write(self) -> None:
        while self._waiting:
            fields = self._waiting[0].event_fields()
            if fields is None:
                return
            self._waiting.popleft()
            self.recorder.event(ModelFed, **fields)


def _digests(found: Sequence[Any]) -> tuple[str, ...]:
    return tuple("" if each is None else each.digest for each in found)


_FEEDS: Final[list[StepFeeds]] = []
"""Who is notified of forward passes; a traced function may hold a list, but not a probe."""
