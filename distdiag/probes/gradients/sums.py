"""Writes down sums over gradients as backward passes give them, and as optimizers find them.

Whatever combines or scales a gradient in between (a wrapper, hooks, the program itself) is linear,
so these sums tell what came of it, without knowing who did it and in what way.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from distdiag.events.base import CallSite
from distdiag.events.gradients import AutogradNode, Flow, GradientSum, GradientSums
from distdiag.probes.base import Probe
from distdiag.probes.gradients.exchange_graph import Way, ways_from
from distdiag.probes.guard import guard, guarded
from distdiag.probes.models.meshes import mesh_of
from distdiag.probes.models.modules import clean_name, own_parameters
from distdiag.probes.models.optimizer_state import parameters_of
from distdiag.probes.models.own_steps import is_due
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.models.wrappers import param_groups
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.content import Pending, contents
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

# A weighted sum over a tensor, or a shard of it, that all ranks take in the same way.

_ROWS: Final = 256
_COLUMNS: Final = 4096


def weighted_sum(
    tensor: torch.Tensor, shape: torch.Size, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum, and that of the squares, over evenly spaced elements.

    The tensor holds the rows from number `first` on of one that has this shape. Each row and
    column has a weight of its own: plain sums are often zero by construction, as those of logits.
    """
    if not tensor.numel():
        zero = tensor.new_zeros((), dtype=torch.float64)
        return zero, zero  # a shard may be empty
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    step = max(1, (shape[0] if shape else 1) // _ROWS)
    stride = max(1, rows.shape[1] // _COLUMNS)
    skipped = -first % step
    taken = rows[skipped::step, ::stride].to(torch.float64)
    weighted = taken * _weights(taken.shape[0], first + skipped, step, taken).unsqueeze(1)
    columns = _weights(taken.shape[1], 0, stride, taken)
    return (weighted.sum(0) * columns).sum(), taken.square().sum()


def _weights(number: int, first: int, step: int, like: torch.Tensor) -> torch.Tensor:
    if like.device.type == "cpu":
        return _known_weights(number, first, step)
    return _new_weights(number, first, step, like.device)


@functools.lru_cache(maxsize=64)
def _known_weights(number: int, first: int, step: int) -> torch.Tensor:
    return _new_weights(number, first, step, torch.device("cpu"))


def _new_weights(number: int, first: int, step: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(number, dtype=torch.float64, device=device) * step + first
    return torch.sin(places * places * 0.317 + places * 12.9898 + 1.0)


# Reads how large a gradient is before and after it was sent to other ranks.

Gradients = Sequence[torch.Tensor | None]


class _Amount(NamedTuple):
    num_elements: int
    total: torch.Tensor
    norm: torch.Tensor


class ExchangeReading:
    """The nodes of one backward pass, and what is found out while it runs.

    A hook that the program has put on the tensor that goes in or comes out runs between two nodes,
    so the gradient is read as the node before has left it and as the node after has got it.
    """

    def __init__(
        self, ways: Sequence[Way], recorder: Recorder, fail: Callable[[Exception], None]
    ) -> None:
        """Watch these nodes until `end`."""
        self._recorder = recorder
        self._fail = fail
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._amounts: dict[tuple[int, str], _Amount] = {}
        self._ways = list(ways)
        self._names = ["" if way.node is None else way.node.name() for way in ways]
        self._handles: list[Any] = []
        for place, way in enumerate(ways):
            if way.node is not None:
                self._handles += self._watch(place, way)

    def _watch(self, place: int, way: Way) -> list[Any]:
        handles = [
            way.node.register_prehook(self._guarded(self._enter, place)),
            way.node.register_hook(self._guarded(self._leave, place)),
        ]
        if way.above is not None:
            node, index = way.above
            handles.append(node.register_hook(self._guarded(self._give, place, index)))
        if way.next is not None:
            node, index = way.next
            handles.append(node.register_prehook(self._guarded(self._get, place, index)))
        return handles

    def _guarded(self, method: Callable[..., None], *fixed: int) -> Callable[..., None]:
        def hook(*gradients: object) -> None:
            if not self._handles or torch.compiler.is_compiling():
                return
            with guard(self._fail):
                method(*fixed, *gradients)

        return hook

    def _enter(self, place: int, _: Gradients) -> None:
        self._first[place] = self._recorder.num_events

    def _leave(self, place: int, passed: Gradients, given: Gradients) -> None:
        first, last = self._first.get(place, 0), self._recorder.num_events
        self._last[place] = last
        before, after = _tensors(given), _tensors(passed)
        is_plain = len(before) == len(after) == 1 and before[0].numel() == after[0].numel()
        if last > first or is_plain:
            self._note(place, "given", before)
            self._note(place, "passed", after)

    def _give(self, place: int, index: int, passed: Gradients, _: Gradients) -> None:
        self._note(place, "above", _tensors(passed[index : index + 1]))

    def _get(self, place: int, index: int, given: Gradients) -> None:
        self._note(place, "next", _tensors(given[index : index + 1]))

    def _note(self, place: int, side: str, tensors: list[torch.Tensor]) -> None:
        if not tensors or not all(map(is_readable, tensors)):
            return
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors]
        totals = [each.sum(dtype=torch.float64) for each in tensors]
        number = sum(each.numel() for each in tensors)
        norm = norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()
        self._amounts[place, side] = _Amount(number, torch.stack(totals).sum(), norm)

    def end(self) -> None:
        """Leave the graph."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        for way in self._ways:
            way.node = way.above = way.next = None

    def scalars(self) -> list[torch.Tensor]:
        """Return what is to be read, in an order of its own."""
        return [each for amount in self._amounts.values() for each in amount[1:]]

    def nodes(self, values: Sequence[float], names: dict[int, str]) -> tuple[AutogradNode, ...]:
        """Return what was found; `names` are those of the leaves, by their ids."""
        left = iter(values)
        flows = {
            key: Flow(amount.num_elements, next(left), next(left))
            for key, amount in self._amounts.items()
        }
        return tuple(
            AutogradNode(
                name=self._names[place],
                calls=(self._first.get(place, 0), self._last.get(place, 0)),
                given=_flow(flows, place, "above", "given"),
                passed=_flow(flows, place, "next", "passed"),
                parameters=tuple(
                    sorted(names[id(leaf)] for leaf in way.leaves if id(leaf) in names)
                ),
                below=tuple(way.below),
                is_bounded=way.is_bounded,
            )
            for place, way in enumerate(self._ways)
        )


def _tensors(gradients: Gradients) -> list[torch.Tensor]:
    return [each for each in gradients if isinstance(each, torch.Tensor)]


def _flow(flows: dict[tuple[int, str], Flow], place: int, beside: str, own: str) -> Flow:
    """Return what the neighbour knows, if it is of the same size, since hooks are in between."""
    mine = flows.get((place, own), Flow(0, math.nan, math.nan))
    other = flows.get((place, beside), mine)
    return other if other.num_elements == mine.num_elements else mine


# Where the gradient of each parameter arrives, and which tensor the optimizer holds.

MOST_READ: Final = 24
"""The gradients of so many parameters of a model are read, and of so many experts."""


class _Rows(NamedTuple):
    """How FSDP2 shards where it does not say so."""

    dim: int = 0


_BY_ROWS: Final = _Rows()


class Leaf(NamedTuple):
    """A parameter as autograd sees it, and as the optimizer does; FSDP2 makes them differ.

    It shards `leaf` over `members`; `held` begins at row `first`, and `num_copies` ranks hold it.
    """

    name: str
    leaf: torch.Tensor
    held: torch.Tensor
    members: tuple[int, ...] = ()
    num_copies: int = 0
    first: int = 0
    is_table: bool = False


def leaves_of(root: nn.Module) -> list[Leaf]:
    """Return the parameters of a model that are trained, in the order of their names."""
    sharded = dict(_sharded(root))
    found: dict[int, Leaf] = {}
    for prefix, module in root.named_modules():
        for name, parameter in own_parameters(module).items():
            known = sharded.get((id(module), name))
            leaf = known or (None if parameter is None else Leaf("", parameter, parameter))
            if leaf is not None and _is_trained(leaf.leaf):
                full = clean_name(f"{prefix}.{name}".lstrip("."))
                is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
                leaf = leaf._replace(name=full, is_table=is_table)
                found.setdefault(id(leaf.held), leaf)
    return sorted(found.values(), key=lambda leaf: leaf.name)


def _is_trained(leaf: torch.Tensor) -> bool:
    return leaf.requires_grad and leaf.is_leaf and not is_lazy(leaf)


def _sharded(root: nn.Module) -> Iterator[tuple[tuple[int, str], Leaf]]:
    for module in root.modules():
        groups = param_groups(module) if hasattr(module, "_get_fsdp_state") else ()
        for group in groups:
            for record in group.fsdp_params:
                info = record._module_info
                yield (id(info.module), info.param_name), _leaf(record, group.mesh_info)


def _leaf(record: Untyped, mesh: Untyped) -> Leaf:
    # Without one there was no forward pass yet: then there is no gradient, either.
    leaf = getattr(record, "_unsharded_param", record.sharded_param)
    members = mesh_of(mesh.mesh).ranks
    size = getattr(mesh, "shard_mesh_size", 0)
    if not size or getattr(record, "fsdp_placement", _BY_ROWS).dim != 0:
        return Leaf("", leaf, record.sharded_param, members)  # not to be added up
    local = local_part(leaf)
    rows = -(-local.shape[0] // size) if local.dim() else 0
    first = rows * int(mesh.shard_mesh_rank)
    return Leaf("", leaf, record.sharded_param, members, len(members) // size, first)


def chosen(leaves: list[Leaf], experts: set[int]) -> list[Leaf]:
    """Return the parameters to read: evenly spaced ones, the same on all ranks that hold them.

    `experts` are the ids of leaves that all-to-alls bring tokens of other ranks to.
    """
    dense = [leaf for leaf in leaves if id(leaf.leaf) not in experts]
    sparse = [leaf for leaf in leaves if id(leaf.leaf) in experts]
    return [*_spaced(dense), *_spaced(sparse)]


def _spaced(leaves: list[Leaf]) -> list[Leaf]:
    step = max(1, -(-len(leaves) // MOST_READ))
    return leaves[::step]


# The probe.

_MOST_MODELS: Final = 8
_MOST_WAITING: Final = 16
_FIGURES: Final = ("weight", "left", "given", "square", "applied")


@dataclass(slots=True)
class _Sums:
    """What is known of one parameter; figures are there when they have been read."""

    leaf: Leaf
    figures: dict[str, torch.Tensor] = field(default_factory=dict)
    is_unreadable: bool = False


@dataclass(slots=True)
class _Window:
    """The passes that lead to one step."""

    step: int
    site: CallSite
    models: dict[str, list[_Sums]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    exchanges: ExchangeReading | None = None
    pending: Pending | None = None
    handles: list[Any] = field(default_factory=list)


class Moments(NamedTuple):
    """When to look, as `Signals` says."""

    exchange_known: Signal[[]]
    backward_started: Signal[object]
    optimizer_stepping: Signal[Any, FrameType]
    step_ended: Signal[[]]


class GradientSumProbe(Probe):
    """Looks at the first steps and every hundredth."""

    name: ClassVar[str] = "gradient-sums"

    def __init__(
        self,
        recorder: Recorder,
        moments: Moments,
        models: Callable[[], Sequence[nn.Module]],
        name_of: Callable[[nn.Module], str],
    ) -> None:
        """Know of no pass yet; `models` returns those that there are, `name_of` their names."""
        super().__init__(recorder)
        self._moments = moments
        self._live_models = models
        self._has_exchanged = False
        self._name_of = name_of
        self._window: _Window | None = None
        self._waiting: deque[_Window] = deque(maxlen=_MOST_WAITING)

    def _install(self) -> None:
        self._subscribe(self._moments.exchange_known, self._know_exchange)
        self._subscribe(self._moments.backward_started, self._before_backward)
        self._subscribe(self._moments.optimizer_stepping, self._before_update)
        self._subscribe(self._moments.step_ended, self._after_step)

    def uninstall(self) -> None:
        """Take the hooks of the parameters away, too."""
        super().uninstall()
        if self._window is not None:
            _let_go(self._window)

    @guarded
    def flush(self) -> None:
        """Write down what has been read by now."""
        self._close()
        self._write()

    # The moments

    @guarded
    def _know_exchange(self) -> None:
        self._has_exchanged = True

    @guarded
    def _before_backward(self, outputs: object) -> None:
        self._write()
        if self._window is not None and self._window.handles:
            return  # a further pass of the same step
        self._close()
        step = self.recorder.step
        is_alone = not dist.is_initialized() or dist.get_world_size() < 2
        if not is_alone and is_due(step) and not _is_compiled():
            self._open(step, outputs)

    def _open(self, step: int, outputs: object) -> None:
        _, frames = self.recorder.backward or ((), ())
        window = self._window = _Window(step, CallSite(frames))
        experts: set[int] = set()
        if self._has_exchanged:
            ways = ways_from(_roots(outputs))
            experts = {id(leaf) for way in ways[1:] for leaf in way.leaves}
            experts -= {id(leaf) for way in ways[:1] for leaf in way.leaves}
            window.exchanges = ExchangeReading(ways, self.recorder, self.fail)
        for model in self._live_models()[:_MOST_MODELS]:
            leaves = leaves_of(model)
            window.names |= {id(leaf.leaf): leaf.name for leaf in leaves}
            sums = [_Sums(leaf) for leaf in chosen(leaves, experts)]
            if sums:
                window.models[self._name_of(model)] = sums
            for each in sums:
                self._watch(window, each)

    def _watch(self, window: _Window, sums: _Sums) -> None:
        leaf = sums.leaf.leaf
        if sums.leaf.held.grad is not None:
            self._read(sums, "left", sums.leaf.held.grad, sums.leaf.first)
        handle = leaf.register_hook(self._hook(sums))  # type: ignore[no-untyped-call]
        _run_first(leaf._backward_hooks, handle.id)
        window.handles.append(handle)

    def _hook(self, sums: _Sums) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self.is_off or torch.compiler.is_compiling():
                return
            with guard(self.fail):
                self._read(sums, "given", gradient, 0)

        return hook

    def _read(self, sums: _Sums, figure: str, tensor: torch.Tensor, first: int) -> None:
        local = local_part(tensor)
        if not is_readable(local):
            sums.is_unreadable = True
            return
        figures, shape = sums.figures, local_part(sums.leaf.leaf).shape
        total, square = weighted_sum(local.detach(), shape, first)
        figures[figure] = figures.get(figure, 0.0) + total
        if figure == "given":
            figures["square"] = figures.get("square", 0.0) + square

    @guarded
    def _before_update(self, optimizer: object, _: FrameType) -> None:
        window = self._window
        if window is None or not isinstance(optimizer, torch.optim.Optimizer):
            return
        owned = {id(parameter) for parameter in parameters_of(optimizer)}
        for sums in (each for model in window.models.values() for each in model):
            held = sums.leaf.held
            is_new = "applied" not in sums.figures and "given" in sums.figures
            if id(held) in owned and held.grad is not None and is_new:
                self._read(sums, "applied", held.grad, sums.leaf.first)
                self._read(sums, "weight", held, sums.leaf.first)

    @guarded
    def _after_step(self) -> None:
        if self._window is not None:
            _let_go(self._window)

    # Writing down

    def _close(self) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        _let_go(window)
        tensors = [t for model in window.models.values() for s in model for t in _tensors_of(s)]
        if window.exchanges is not None:
            tensors += window.exchanges.scalars()
        window.pending = contents(tensors)
        self._waiting.append(window)

    def _write(self) -> None:
        while self._waiting:
            window = self._waiting[0]
            found = window.pending.take() if window.pending is not None else []
            if found is None:
                return
            self._waiting.popleft()
            values = iter([math.nan if each is None else each.mean for each in found])
            gradients = {
                name: tuple(
                    [_result(sums, [next(values) for _ in _tensors_of(sums)]) for sums in model]
                )
                for name, model in window.models.items()
            }
            nodes: tuple[AutogradNode, ...] = ()
            if window.exchanges is not None:
                nodes = window.exchanges.nodes(list(values), window.names)
            for name, sums in gradients.items():
                if any(not math.isnan(each.given) for each in sums):
                    self.recorder.event(
                        GradientSums,
                        step=window.step,
                        model=name,
                        gradients=sums,
                        nodes=nodes,
                        site=window.site,
                    )


def _run_first(hooks: Untyped, number: int) -> None:
    """Let a hook run before those that change the gradient.

    Autograd goes by the order of insertion, not by that of an OrderedDict.
    """
    others = [(key, hook) for key, hook in hooks.items() if key != number]
    hook = hooks[number]
    hooks.clear()
    hooks[number] = hook
    hooks.update(others)


def _let_go(window: _Window) -> None:
    while window.handles:
        window.handles.pop().remove()
    if window.exchanges is not None:
        window.exchanges.end()


def _tensors_of(sums: _Sums) -> list[torch.Tensor]:
    return [sums.figures[figure] for figure in _FIGURES if figure in sums.figures]


def _result(sums: _Sums, values: list[float]) -> GradientSum:
    there = [figure for figure in _FIGURES if figure in sums.figures]
    found = dict.fromkeys(_FIGURES, math.nan) | {"left": 0.0}
    if not sums.is_unreadable:
        found |= dict(zip(there, values, strict=True))
    leaf = sums.leaf
    return GradientSum(
        name=leaf.name,
        num_elements=leaf.leaf.numel(),
        members=leaf.members,
        num_copies=leaf.num_copies,
        weight=found["weight"],
        left=found["left"],
        given=found["given"],
        norm=math.sqrt(found["square"]) if found["square"] >= 0 else math.nan,
        applied=found["applied"],
        is_table=leaf.is_table,
    )


def _is_compiled() -> bool:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))


def _roots(outputs: object) -> list[Any]:
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    found = [getattr(tensor, "grad_fn", None) for tensor in tensors]
    return [node for node in found if node is not None]
