"""Looks at all models and optimizers at the moments that matter, and writes down what they hold.

It looks when a model has been wrapped, before the first backward pass of any other one, and at
the first optimizer steps after that, those of powers of two and every hundredth.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.events.base import CallSite
from distdiag.events.models import (
    Content,
    ModelPlan,
    ModelState,
    Moment,
    ObjectKind,
    ReplicaEvidence,
    SliceSaved,
    TensorPlan,
    kept_ranks,
)
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.creations import Creations
from distdiag.probes.guard import guarded
from distdiag.probes.models.attention_heads import HeadCounts
from distdiag.probes.models.emptied import EmptiedTensors
from distdiag.probes.models.lost_ties import LostTies
from distdiag.probes.models.modules import (
    ModuleHook,
    clean_name,
    own_buffers,
    own_parameters,
    slots_of,
)
from distdiag.probes.models.optimizer_samples import OptimizerSamples
from distdiag.probes.models.optimizer_state import owners_of
from distdiag.probes.models.own_steps import OwnSteps
from distdiag.probes.models.registry import LiveModels, ObjectRegistry, class_of
from distdiag.probes.models.tensor_plans import Held, Surroundings, address_of, local_part, plan_of
from distdiag.probes.models.wrappers import (
    Tree,
    WrapTimes,
    is_wrapped,
    keeps,
    parameters_in,
    sharded_parameters,
    unwrapped,
    walk,
)
from distdiag.probes.tensors.by_identity import WeakMap, WeakMembers
from distdiag.probes.tensors.content import Pending, contents
from distdiag.probes.tensors.kinds import is_dtensor
from distdiag.probes.tensors.sample_rows import tensors_in
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

# Contents that are being read: on a GPU they are there only some time later.


@dataclass(slots=True)
class Reading:
    """What was asked for, and what came of it."""

    model: str
    moment: Moment
    step: int
    site: CallSite
    contents: list[Content | None] = field(default_factory=list)


class Readings:
    """Readings in the order in which they were asked for."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Reading, Pending, list[int]]] = deque()

    def add(self, reading: Reading, tensors: Sequence[torch.Tensor | None]) -> None:
        """Begin to read; None stands for a tensor that is not there."""
        places = [place for place, tensor in enumerate(tensors) if tensor is not None]
        reading.contents = [None] * len(tensors)
        pending = contents([tensor for tensor in tensors if tensor is not None])
        self._waiting.append((reading, pending, places))

    def guard(self) -> None:
        """Let what is written next on the device wait until it was read; the host does not."""
        for _, pending, _ in self._waiting:
            pending.guard()

    def take(self) -> list[Reading]:
        """Return what has been read since."""
        return self._finished(may_wait=False)

    def wait(self) -> list[Reading]:
        """Return all that was asked for."""
        return self._finished(may_wait=True)

    def _finished(self, *, may_wait: bool) -> list[Reading]:
        done = []
        while self._waiting:
            reading, pending, places = self._waiting[0]
            found = pending.wait() if may_wait else pending.take()
            if found is None:
                break
            for place, content in zip(places, found, strict=True):
                reading.contents[place] = None if content is None else Content(*content)
            done.append(reading)
            self._waiting.popleft()
        return done


# Parts of sharded parameters among what a program saves as plain tensors.

_DEEPEST: Final = 6
_MOST_TENSORS: Final = 20_000


def slices_in(saved: object, roots: Iterable[nn.Module]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the parameters whose local part is saved, and the ranks that hold the other parts."""
    shards = {address: found for root in roots for address, found in _shards(root)}
    if not shards:
        return (), ()
    found = {}
    plain = (tensor for tensor in tensors_in(saved, _DEEPEST) if not is_dtensor(tensor))
    for tensor in islice(plain, _MOST_TENSORS):
        name, shape, members = shards.get(address_of(tensor) or 0, ("", (), ()))
        if name and tuple(tensor.shape) == shape:
            found[name] = members
    return tuple(found), next(iter(found.values()), ())


def own_parts_in(
    saved: object, root: nn.Module, plans: Iterable[TensorPlan], others: Iterable[torch.Tensor]
) -> tuple[str, ...]:
    """Return the trained parameters that were left to each rank, of those that are saved.

    None, if tensors of their shapes are saved that are neither in the model nor among `others`:
    they may be those of other ranks.
    """
    own = {
        plan.name: plan.shape
        for plan in plans
        if plan.requires_grad and (plan.is_ignored or plan.evidence is ReplicaEvidence.OWN)
    }
    if not own:
        return ()
    places = {address_of(tensor): clean_name(name) for name, _, tensor in slots_of(root)}
    known = {address_of(tensor) for tensor in others} | places.keys()
    plain = (tensor for tensor in tensors_in(saved, _DEEPEST) if not is_dtensor(tensor))
    found: dict[str, None] = {}
    for tensor in islice(plain, _MOST_TENSORS):
        address = address_of(tensor)
        if address not in known and tuple(tensor.shape) in own.values():
            return ()
        if places.get(address) in own:
            found[places[address]] = None
    return tuple(found)


def _shards(root: nn.Module) -> Iterator[tuple[int, tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    tree = list(walk(root))
    records = sharded_parameters(tree)
    for path, module, _ in tree:
        for name, parameter in own_parameters(module).items():
            record = records.get((id(module), name))
            whole: Any = parameter if record is None else record.sharded_param
            if whole is None or not is_dtensor(whole):
                continue
            local = whole._local_tensor
            if 0 < local.numel() < whole.numel():
                members = other_parts(whole)
                full = clean_name(f"{path}.{name}" if path else name)
                yield address_of(local) or -1, (full, tuple(local.shape), members)


def other_parts(tensor: Untyped) -> tuple[int, ...]:
    """Return the ranks that hold the parts of one copy, with this one."""
    mesh, here = tensor.device_mesh.mesh, tensor.device_mesh.get_coordinate()
    axes = zip(here, tensor.placements, strict=False)
    where = [slice(None) if each.is_shard() else at for at, each in axes]
    return tuple(mesh[tuple(where)].flatten().tolist())


# Which parameters the program itself broadcasts, or reduces the gradients of, and over whom.

_Ranks = dict[int, tuple[weakref.ref[nn.Parameter], tuple[int, ...]]]


def _alive(found: _Ranks) -> dict[int, tuple[int, ...]]:
    return {key: ranks for key, (reference, ranks) in found.items() if reference() is not None}


class SharedTensors:
    """Recognises parameters by the memory that a collective is given."""

    def __init__(self, roots: Callable[[], Iterable[nn.Module]]) -> None:
        self._roots = roots
        self._owners: dict[tuple[int, int], tuple[weakref.ref[nn.Parameter], bool]] = {}
        self._made_at: tuple[int, int] = (-1, -1)
        self._sent: _Ranks = {}
        self._reduced: _Ranks = {}

    def sent(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks that share a parameter because it was sent round, by its id."""
        return _alive(self._sent)

    def reduced(self, num_backwards: int) -> dict[int, tuple[int, ...]]:
        """Return the ranks that have reduced a parameter's gradient since this backward pass."""
        return _alive(self._reduced) if self._made_at[1] == num_backwards else {}

    def note(self, tensors: Untyped, group: Untyped, now: tuple[int, int]) -> None:
        """Take note of a collective; `now` counts models and backward passes."""
        if now != self._made_at:
            self._made_at = now
            self._owners = dict(self._places())
            self._reduced.clear()
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            found = self._owners.get(_place(tensor)) if _is_plain(tensor) else None
            owner = None if found is None else found[0]()
            if found is not None and owner is not None:
                ranks = tuple(dist.get_process_group_ranks(group))
                (self._reduced if found[1] else self._sent)[id(owner)] = (found[0], ranks)

    def _places(
        self,
    ) -> Iterable[tuple[tuple[int, int], tuple[weakref.ref[nn.Parameter], bool]]]:
        for root in self._roots():
            for parameter in root.parameters():
                for tensor in (parameter, parameter.grad):
                    if tensor is not None and not is_dtensor(tensor):
                        yield _place(tensor), (weakref.ref(parameter), tensor is not parameter)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor lies and how large it is; nobody is at 0."""
    return address_of(tensor) or 0, tensor.numel() if address_of(tensor) else -1


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and not is_dtensor(tensor)


# Names of models under which ranks find each other's: the class, what wraps it, and a number.


class WrappedNames:
    """Gives each model a name that it keeps."""

    def __init__(self, roots: Callable[[], Iterable[nn.Module]], creations: Creations) -> None:
        """Have named none; `roots` are the models that there are."""
        self._roots = roots
        self._creations = creations
        self._names: WeakMap[nn.Module, str] = WeakMap()
        self._num_models: dict[str, int] = {}

    def name(self, root: nn.Module) -> str:
        """Return the name of a model."""
        name = self._names.get(root)
        if name is None:
            kind = class_of(root)
            wrappers = {wrapper.kind for _, _, wrapper in walk(root) if wrapper.kind}
            kind = " ".join([*sorted(wrappers), kind])
            number = self._num_models[kind] = self._num_models.get(kind, 0) + 1
            name = kind if number == 1 else f"{kind}#{number}"
            if not wrappers and (number > 1 or self.num_alike(root) > 1):
                # With another number of them on another rank, nobody knows which is which.
                name = f"{kind} {number} of {self.num_alike(root)}"
            self._names[root] = name
            self._creations.tell(ObjectKind.MODEL, name, unwrapped(root), root)
        return name

    def known(self, root: nn.Module) -> str:
        """Return the name of a model that has one already, else nothing."""
        return self._names.get(root) or ""

    def num_alike(self, root: nn.Module) -> int:
        """Count the models of a class that nothing wraps: which is which is not known."""
        alike = [each for each in self._roots() if type(each) is type(root)]
        return sum(not is_wrapped(each) for each in alike)


# The probe.

CHUNK: Final = 256
_MOST_EVALUATIONS: Final = 3
"""What no rank sends to the others differs from the first evaluation on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """When to look, as `Signals` says; `model_started` gets each model that begins."""

    model_parallelizing: Signal[nn.Module]
    model_wrapped: Signal[Sequence[nn.Module]]
    sequence_cut: Signal[object, Sequence[torch.Tensor]]
    tensors_shared: Signal[Any, Any, str]
    state_saving: Signal[object, FrameType]
    before_first_forward: Signal[[]]
    before_backward: Signal[[]]
    backward_ended: Signal[bool]
    optimizer_stepping: Signal[Any, FrameType]
    optimizer_stepped: Signal[Any]
    model_started: Signal[nn.Module]
    evaluated: Signal[nn.Module]


class ModelSnapshots(Probe):
    """Writes plans, contents and optimizers down."""

    name: ClassVar[str] = "models"

    def __init__(
        self,
        recorder: Recorder,
        moments: Moments,
        models: LiveModels,
        creations: Creations,
        is_routing_bias: Callable[[nn.Module, str], bool],
        *,
        only_start: bool = False,
    ) -> None:
        """Know of no model yet; `only_start`: leave the optimizer steps out.

        `is_routing_bias` says whether a module chooses experts by the tensor of this name.
        """
        super().__init__(recorder)
        self._moments = moments
        self.wrap_times = WrapTimes()
        self._roots = models.roots
        self._shared = SharedTensors(self._roots)
        self._only_start = only_start
        self._modules = models
        self._optimizer_registry = ObjectRegistry(
            torch.optim.Optimizer, ("_patch_step_function",), creations
        )
        self._is_routing_bias = is_routing_bias
        self._cut: WeakMembers[torch.Tensor] = WeakMembers()
        self._readings = Readings()
        self._names = WrappedNames(self._roots, creations)
        self._started: WeakMembers[nn.Module] = WeakMembers()
        self._hooks: list[Any] = []
        self._evaluated: WeakMap[nn.Module, list[int]] = WeakMap()
        """After which numbers of its steps the statistics of a model were looked at."""
        self._sought: WeakMap[nn.Module, int] = WeakMap()
        """After which number of its steps a model last computed gradients for inputs."""
        self._plans: WeakMap[nn.Module, tuple[TensorPlan, ...]] = WeakMap()
        self._num_looked_at = 0
        self._heads = HeadCounts()
        self._lost_ties = LostTies()
        self._emptied = EmptiedTensors()
        self._steps = OwnSteps(
            self._roots, lambda: (self._modules.count, self._optimizer_registry.count)
        )
        # Other probes ask, too.
        self.own_steps = self._steps
        self.name_of, self.known_name = self._names.name, self._names.known
        self._optimizers = OptimizerSamples(
            recorder, self._modules, self._optimizer_registry, self._steps, self.name_of, creations
        )

    def _install(self) -> None:
        self._modules.watch(self._patches, self.fail)
        self._lost_ties.watch(self._patches, self.fail)
        self._emptied.watch(self._patches, self.fail)
        self._optimizer_registry.watch(self._patches, self.fail)
        wrapping = self._call_after(self._before_forward)
        # Not the constructor: its warnings name the line of whoever calls it.
        self._patches.wrap(DistributedDataParallel, "_ddp_init_helper", wrapping)
        moments = self._moments
        self._subscribe(moments.model_parallelizing, self._before_parallelizing)
        self._subscribe(moments.model_wrapped, self._after_wrap)
        self._subscribe(moments.sequence_cut, self._before_cut)
        self._subscribe(moments.tensors_shared, self._before_share)
        self._subscribe(moments.state_saving, self._before_save)
        self._subscribe(moments.before_first_forward, self._before_forward)
        self._subscribe(moments.evaluated, self._after_evaluation)
        self._subscribe(moments.before_backward, self._before_backward)
        self._subscribe(moments.backward_ended, self._after_backward)
        self._subscribe(moments.optimizer_stepping, self._before_step)
        self._subscribe(moments.optimizer_stepped, self._after_step)

    @guarded
    def flush(self) -> None:
        """Write down what has been read by now."""
        self._write_readings(self._readings.take())
        self._optimizers.settle()

    # The moments

    @guarded
    def _before_parallelizing(self, module: nn.Module) -> None:
        """Take note of what is one parameter: each module gets its own ones distributed."""
        self._lost_ties.begin(module)

    @guarded
    def _after_wrap(self, modules: Sequence[nn.Module]) -> None:
        """Take note of the parameters that FSDP2 found in the modules it has wrapped."""
        for module in modules:
            self.wrap_times.wrapped(module)
            self._lost_ties.end(module, "parallelize_module")
        wrapped = set(map(id, modules))
        for root in list(self._started):
            if any(id(part) in wrapped for part in root.modules()):
                self._started.discard(root)  # it begins anew, as another one
                self._num_looked_at = -1

    @guarded
    def _before_cut(self, _: object, buffers: Sequence[torch.Tensor]) -> None:
        """Take note of buffers of which each rank will have a part: they are resized in place."""
        for buffer in buffers:
            self._cut.add(buffer)

    def _before_share(self, tensors: object, group: object, _: str) -> None:
        """Take note of parameters and gradients that the program itself sends round."""
        if not self._started or any(map(self._steps.is_due, self._started)):
            self._note_share(tensors, group)

    @guarded
    def _note_share(self, tensors: object, group: object) -> None:
        self._shared.note(tensors, group, (self._modules.count, self.recorder.num_backwards))

    @guarded
    def _before_save(self, saved: object, frame: FrameType) -> None:
        """Take note of parts of sharded parameters that are saved as if they were all."""
        names, members = slices_in(saved, self._roots())
        if names:
            site = CallSite(frames_of(frame, self.recorder.main_script))
            self.recorder.event(SliceSaved, names=names, members=members, site=site)
        states = [t for each in self._optimizers.alive() for t in tensors_in(each.state, _DEEPEST)]
        for root in self._started:
            plans = self._plans.get(root, ())
            own, kept = own_parts_in(saved, root, plans, states), tuple(sorted(kept_ranks(plans)))
            if own and len(kept) > 1:
                site = CallSite(frames_of(frame, self.recorder.main_script))
                self.recorder.event(SliceSaved, names=own, members=kept, site=site, are_own=True)

    @guarded
    def _before_forward(self, /, *_: object, **__: object) -> None:
        """Look at models that were wrapped, and have not been used since."""
        for root in self._roots():
            if root not in self._started and is_wrapped(root):
                self._start(root)

    @guarded
    def _before_backward(self) -> None:
        """Look at models that were never wrapped: they are complete by now."""
        self._write_readings(self._readings.take())
        self._optimizers.settle()
        if self._modules.count == self._num_looked_at:
            return
        self._num_looked_at = self._modules.count
        for root in self._roots():
            if root not in self._started:
                self._start(root)

    @guarded
    def _after_backward(self, is_complete: bool) -> None:
        """Look at the gradients: this may be the last pass before the step."""
        if self._only_start or not is_complete:
            return
        self._steps.after_backward(self._started)
        if any(self._steps.is_due(root) for root in self._started):
            for root in self._trained():
                if self._steps.is_due(root):
                    self._look(root, Moment.BACKWARD)

    @guarded
    def _before_step(self, optimizer: object, frame: FrameType) -> None:
        """Look at what an optimizer is about to change, and at itself."""
        if self._only_start or not isinstance(optimizer, torch.optim.Optimizer):
            return
        roots = [root for root in self._steps.roots_of(optimizer) if root in self._started]
        due = self._optimizers.count(optimizer) or any(map(self._steps.is_due, roots))
        for root in roots:
            # Between two optimizers of one step the model is half changed.
            if self._steps.begins(root, self.recorder.num_backwards):
                if self._steps.is_due(root):
                    self._look(root, Moment.GRADIENT, Moment.STEP)
                self._steps.advance(root)
        if due:
            plans = [plan for root in roots for plan in self._plans.get(root, ())]
            self._optimizers.begin(optimizer, plans, frame)

    @guarded
    def _after_step(self, optimizer: object) -> None:
        """Write down what was seen of an optimizer, now that it has stepped."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._optimizers.end(optimizer)

    def _watch_evaluations(self, root: nn.Module) -> None:
        """Look at evaluations, too, of what is inside a wrapper that never sends statistics."""
        wrapped = weakref.ref(root)

        def after(module: nn.Module, given: object, _: object) -> None:
            whole = wrapped()
            if not module.training and whole is not None:
                self._after_evaluation(whole, given)

        for part in root.modules():
            if isinstance(part, DistributedDataParallel) and not part.broadcast_buffers:
                self._hooks.append(part.module.register_forward_hook(ModuleHook(after)))

    def uninstall(self) -> None:
        """Take the hooks away again."""
        for hook in self._hooks:
            hook.remove()
        super().uninstall()

    @guarded
    def _after_evaluation(self, root: nn.Module, given: object = ()) -> None:
        """Look at the statistics by which a wrapped model has normalised, the first few times."""
        if self._only_start or root not in self._started:
            return
        number, looks = self._steps.of(root), self._evaluated.setdefault(root, [])
        if number == 0 or number in looks or len(looks) >= _MOST_EVALUATIONS:
            return
        # What wants a gradient for its inputs looks for samples to train on, such as adversarial
        # ones, and what else it computes in this step is a part of that.
        if any(tensor.requires_grad for tensor in tensors_in(given)):
            self._sought[root] = number
        if self._sought.get(root) == number:
            return
        looks.append(number)
        parts = (part for part in root.modules() if not part.training)
        kept = {id(tensor) for part in parts for tensor in _statistics_of(part)}
        if kept:
            held = self._write_plan(root, Moment.EVALUATION)
            tensors = [each.tensor if id(each.tensor) in kept else None for each in held]
            self._read(root, Moment.EVALUATION, tensors)

    def _trained(self) -> list[nn.Module]:
        roots = [r for each in self._optimizers.alive() for r in self._steps.roots_of(each)]
        return [root for root in {id(r): r for r in roots}.values() if root in self._started]

    # Looking

    def _start(self, root: nn.Module) -> None:
        self._started.add(root)
        self._steps.start(root)
        self._watch_evaluations(root)
        self._read(root, Moment.START, [h.tensor for h in self._write_plan(root, Moment.START)])
        self._moments.model_started.emit(root)

    def _look(self, root: nn.Module, *moments: Moment) -> None:
        """Look at a model; between the moments nothing of the program runs."""
        held = self._write_plan(root, moments[0])
        for moment in moments:
            if moment is Moment.STEP:
                self._read(root, moment, [each.tensor for each in held])
            elif any(each.tensor.grad is not None for each in held if each.plan.requires_grad):
                self._read(root, moment, [_gradient(each) for each in held])

    def _write_plan(self, root: nn.Module, moment: Moment) -> list[Held]:
        name = self.name_of(root)
        tree = list(walk(root))
        held = plan_of(tree, self._surroundings(root, tree))
        plans = tuple(each.plan for each in held)
        if moment is Moment.START or self._plans.get(root) != plans:
            self._plans[root] = plans
            for first in range(0, len(plans), CHUNK):
                self.recorder.event(
                    ModelPlan,
                    step=self._steps.of(root),
                    model=name,
                    moment=moment,
                    first=first,
                    total=len(plans),
                    tensors=plans[first : first + CHUNK],
                    site=self._site(),
                )
        return held

    def _site(self) -> CallSite:
        return CallSite(frames_of(sys._getframe(1), self.recorder.main_script))

    def _surroundings(self, root: nn.Module, tree: Tree) -> Surroundings:
        world = tuple(range(dist.get_world_size()))
        # Asked of a frozen model only.
        is_frozen_copy = not any(each.requires_grad for each in parameters_in(tree))
        is_frozen_copy = is_frozen_copy and any(keeps(each, world) for each in self._started)
        is_frozen_copy = is_frozen_copy and self._names.num_alike(root) == 1
        return Surroundings(
            owners=owners_of(self._optimizers.alive(), self._optimizers.labels()),
            reduced=self._shared.reduced(self.recorder.num_backwards),
            sent=self._shared.sent(),
            is_local=self._steps.is_local(root),
            is_bypassed=self._steps.is_bypassed(root),
            heads=self._heads,
            training_ranks=world if is_frozen_copy else (),
            world=world,
            wrap_times=self.wrap_times,
            is_cut=self._cut.__contains__,
            is_routing_bias=self._is_routing_bias,
            lost_ties=self._lost_ties.pairs,
            emptied=self._emptied.digest,
        )

    def _read(
        self, root: nn.Module, moment: Moment, tensors: Sequence[torch.Tensor | None]
    ) -> None:
        locals_ = [None if tensor is None else local_part(tensor) for tensor in tensors]
        reading = Reading(self.name_of(root), moment, self._steps.of(root), self._site())
        self._readings.add(reading, locals_)
        self._readings.guard()  # whatever comes next may write
        self._write_readings(self._readings.take())

    def _write_readings(self, done: Sequence[Reading]) -> None:
        for reading in done:
            total = len(reading.contents)
            for first in range(0, total, CHUNK):
                self.recorder.event(
                    ModelState,
                    step=reading.step,
                    model=reading.model,
                    moment=reading.moment,
                    first=first,
                    total=total,
                    contents=tuple(reading.contents[first : first + CHUNK]),
                    site=reading.site,
                )


def _statistics_of(module: nn.Module) -> list[torch.Tensor]:
    """Return what a layer of normalisation keeps of the samples that it has seen."""
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return [each for each in own_buffers(module).values() if each is not None] if is_norm else []


def _gradient(held: Held) -> torch.Tensor | None:
    gradient = held.tensor.grad if held.plan.requires_grad else None
    if gradient is None or not is_dtensor(gradient):
        return gradient
    # One that is still a partial sum is reduced when it is used.
    placements = tuple(str(each) for each in gradient.placements)  # type: ignore[attr-defined]
    return gradient if placements == held.plan.placements else None
