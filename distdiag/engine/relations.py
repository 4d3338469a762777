"""Puts what ranks were given and what they drew side by side, along the axis that is known."""

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, NamedTuple

from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere
from distdiag.engine.bounded import MOST_FOLLOWED, BySite, Recent
from distdiag.engine.side_by_side import SideBySide
from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import Collective, GroupCreated, Signature
from distdiag.events.data import Draw, ModelFed
from distdiag.events.models import Mesh, ModelPlan, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.views.base import View
from distdiag.views.experts import is_of_expert
from distdiag.views.relations import (
    DIVIDED_LATER,
    DRAWN,
    FEW_PASSES,
    IN_ORDER,
    NO_ROWS,
    NOT_LOADED,
    ONE_BATCH,
    OWN_NOISE,
    PARTS_OF_BATCH,
    SEEDED_BY_LIBRARY,
    SHARED_WORK,
    Allowance,
    Axis,
    Item,
    MaskView,
    NormalisedFeeds,
    OtherInputs,
    ReplicatedInputs,
    SampledInputs,
    are_different,
)

# What ranks send each other between a batch and the end of the forward pass.

_MOST_CALLS: Final = 64
_REDUCTIONS: Final = ("all_reduce", "allreduce", "reduce")
_SCATTERS: Final = ("reduce_scatter", "_reduce_scatter")
_NO_EXCHANGES: Final = ("barrier", "broadcast")
_OWN_FILES: Final = ("/torch/distributed/fsdp/", "/torch/nn/", "/torch/optim/", "/deepspeed/")
_FRONTS: Final = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/nn/functional.py",
    "/torch/_ops.py",
    "/contextlib.py",
    "/deepspeed/comm/comm.py",
    "/deepspeed/comm/torch.py",
)


class _Call(NamedTuple):
    """A collective of the program itself: how many rows a rank gave, and what comes back."""

    seq: int
    num_rows: int
    is_sum: bool
    is_scattered: bool


class Exchanges:
    """The latest collectives of each rank that bring more than gradients and parameters."""

    def __init__(self) -> None:
        self._calls: dict[int, deque[_Call]] = {}
        self._is_foreign = BySite(is_foreign)

    def feed(self, call: Collective) -> None:
        """Take in a collective."""
        op = call.signature.op
        if op.startswith(_NO_EXCHANGES):
            return
        is_scattered = op.startswith(_SCATTERS)
        is_sum = op.startswith(_REDUCTIONS) and not is_scattered
        num_rows = _num_rows(call.signature)
        if len(call.group.ranks) < 2 or (is_sum and num_rows < 2):
            return
        if self._is_foreign.of(call.site):
            calls = self._calls.setdefault(call.rank, deque(maxlen=_MOST_CALLS))
            calls.append(_Call(call.seq, num_rows, is_sum, is_scattered))

    def are_for(self, fed: ModelFed) -> bool:
        """Say whether a rank has sent more than gradients and parameters for these samples."""
        fewest = max(min(fed.batch_sizes, default=0), 2)
        before = (c for c in self._calls.get(fed.rank, ()) if 0 <= fed.since <= c.seq < fed.begin)
        # Before the forward pass: what was found for each sample, such as rewards of answers.
        return any(not c.is_sum for c in self._inside(fed)) or any(
            call.num_rows >= fewest for call in before
        )

    def are_inside(self, fed: ModelFed) -> bool:
        """Say whether it has exchanged activations in this forward pass, or summed them up."""
        return any(self._inside(fed))

    def have_parts(self, fed: ModelFed) -> bool:
        """Say whether each rank went on with a part of a sum over activations."""
        return any(call.is_scattered for call in self._inside(fed))

    def _inside(self, fed: ModelFed) -> Iterator[_Call]:
        return (c for c in self._calls.get(fed.rank, ()) if fed.begin <= c.seq < fed.end)


def _num_rows(signature: Signature) -> int:
    """Return how many rows the tensors have that a rank gives, 0 for single figures."""
    return max((sizes[0] for sizes in signature.input_sizes if sizes), default=0)


def is_foreign(site: CallSite) -> bool:
    """Say whether something else than a wrapper, a norm or an optimizer of torch's calls."""
    caller = next((f.file for f in site.frames if not f.file.endswith(_FRONTS)), "")
    return not any(own in caller for own in _OWN_FILES)


# Which ranks reduce the gradients of a model that nothing wraps.


@dataclass(slots=True)
class _Reduced:
    """Over which ranks gradients of a model are reduced, and whether all of them are."""

    groups: set[tuple[int, ...]] = field(default_factory=set)
    are_all: bool = True


_MOST_OF_CLASS: Final = 16
"""Of so many models of one class on one rank it counts what became of their gradients."""


class ReducedModels:
    """What ranks have done with the gradients of their models, by rank and class."""

    def __init__(self) -> None:
        self._known: Recent[tuple[int, str], Recent[str, _Reduced]] = Recent(MOST_FOLLOWED * 64)

    def feed(self, plan: ModelPlan) -> None:
        """Take in a part of a plan; the latest one counts."""
        key = plan.rank, _class_of(plan.model)
        models: Recent[str, _Reduced] = self._known.of(key, lambda: Recent(_MOST_OF_CLASS))
        if plan.first == 0:
            models.pop(plan.model, None)
        known = models.of(plan.model, _Reduced)
        for tensor in (each for each in plan.tensors if each.requires_grad):
            if tensor.evidence is ReplicaEvidence.REDUCED:
                known.groups.add(tuple(sorted(tensor.replicas)))
            else:
                known.are_all = False

    def of(self, fed: ModelFed) -> tuple[tuple[int, ...], bool]:
        """Return the ranks, none if they are not known, and whether they reduce everything."""
        known_of_class = self._known.get((fed.rank, _class_of(fed.model)))
        models = known_of_class.values() if known_of_class is not None else ()
        groups = {group for known in models for group in known.groups}
        members = groups.pop() if len(groups) == 1 else ()
        return members, all(known.are_all for known in models)

    def all_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks over which all gradients of all models are reduced, else none."""
        mine = [k for (r, _), known in self._known.items() if r == rank for k in known.values()]
        groups = {group for known in mine for group in known.groups}
        is_whole = len(groups) == 1 and all(known.are_all for known in mine)
        return groups.pop() if is_whole else ()


def _class_of(model: str) -> str:
    return model.partition("#")[0]


# Which ranks hold shards of one model, by the names of axes and groups.

_TENSOR: Final = re.compile(r"(^|[_\W])(tp|tensor\w*|model_?parallel\w*)($|[_\W])")
_SHARDS: Final = ("S", "_S")
"""How placements of shards are written: ``S(0)``, ``_StridedShard(…)``."""


class ShardGroups:
    """The ranks that compute one result together, each with its shards of the parameters."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[RankSet, str]] = {}

    def feed_group(self, group: GroupCreated) -> None:
        """Take in a process group that is named so."""
        if _TENSOR.search(group.desc.lower()) and group.rank in group.ranks:
            known_by = f"their process group is named {group.desc}"
            self._groups.setdefault(group.rank, (RankSet(group.ranks), known_by))

    def feed_plan(self, plan: ModelPlan) -> None:
        """Take in parameters that are sharded along an axis of a mesh that is named so."""
        for tensor in plan.tensors:
            if tensor.mesh is not None and tensor.is_parameter and not is_of_expert(tensor):
                axes = zip(tensor.mesh.names, tensor.placements, strict=False)
                for axis, (name, placement) in enumerate(axes):
                    if placement.startswith(_SHARDS) and _TENSOR.search(name.lower()):
                        known_by = f"{tensor.name} is sharded over them along {name}"
                        group = RankSet(_along(tensor.mesh, axis, plan.rank))
                        self._groups[plan.rank] = (group, known_by)

    def of(self, fed: ModelFed) -> tuple[RankSet, str]:
        """Return the ranks, none if they are not known or a wrapper holds them apart."""
        ranks, known_by = self._groups.get(fed.rank, (RankSet(), ""))
        is_apart = set(ranks) & set(fed.members) <= {fed.rank}
        return (ranks, known_by) if is_apart else (RankSet(), "")


def _along(mesh: Mesh, axis: int, rank: int) -> list[int]:
    """Return the ranks that differ from this one in one coordinate only."""
    if rank not in mesh.ranks:
        return []
    stride, place = math.prod(mesh.sizes[axis + 1 :]), mesh.ranks.index(rank)
    first = place - place // stride % mesh.sizes[axis] * stride
    return [mesh.ranks[first + step * stride] for step in range(mesh.sizes[axis])]


class _Shared(NamedTuple):
    """What a rank was given that computes one result with others."""

    rank: int
    place: tuple[str, int]
    members: tuple[int, ...]
    fed: ModelFed


# Draws that belong together: those with the same number in the forward passes of all ranks.

_FEWEST: Final = 2
_Passes = tuple[Mapping[int, ModelFed], ...]


def _inside_draws(fed: ModelFed) -> list[Draw]:
    return [draw for draw in fed.draws if draw.is_inside and draw.activation]


def _equal_masks(by_rank: Mapping[int, ModelFed]) -> dict[int, Draw] | None:
    """Return the first draws from one state for activations that are different on all ranks."""
    for draws in zip(*map(_inside_draws, by_rank.values()), strict=False):
        if len({(draw.api, draw.module) for draw in draws}) > 1:
            return None  # the ranks do not compute the same any more
        is_one_state = len({draw.state for draw in draws}) == 1
        if is_one_state and are_different(draw.activation for draw in draws):
            return dict(zip(by_rank, draws, strict=True))
    return None


def _unequal_masks(by_rank: Mapping[int, ModelFed]) -> dict[int, Draw] | None:
    """Return the first draws from different states for one activation that all ranks hold."""
    for draws in zip(*map(_inside_draws, by_rank.values()), strict=False):
        if len({(draw.api, draw.module, draw.sizes) for draw in draws}) > 1:
            return None  # the ranks do not compute the same any more
        is_one = len({draw.activation for draw in draws}) == 1
        if is_one and len({draw.state for draw in draws}) > 1:
            return dict(zip(by_rank, draws, strict=True))
    return None


def _equal_noise(by_rank: Mapping[int, ModelFed]) -> dict[int, Draw] | None:
    """Return the first draw for the samples of a batch, if it is the same on all ranks."""
    draws = [_first_for_samples(fed) for fed in by_rank.values()]
    found = [draw for draw in draws if draw is not None]
    keys = {(draw.api, draw.sizes[:1], draw.state) for draw in found}
    if len(found) < len(draws) or len(keys) != 1:
        return None
    return dict(zip(by_rank, found, strict=True))


def _first_for_samples(fed: ModelFed) -> Draw | None:
    """Return the first draw of as many rows as there are samples, noise rather than data."""
    draws = [
        draw
        for draw in fed.draws
        if draw.sizes and draw.sizes[0] in fed.batch_sizes and not draw.activation
    ]
    # What a generator of its own yields, or what is drawn before the model, may be the samples.
    return min(draws, key=lambda draw: (not draw.is_inside, draw.is_given), default=None)


def _may_be_samples(by_rank: Mapping[int, ModelFed], draw: Draw) -> bool:
    """Say whether it can be the samples themselves that are drawn, to be divided later."""
    batches = {fed.batch for fed in by_rank.values()}
    return not draw.is_inside and ("" in batches or len(batches) < len(by_rank))


def _has_library_seed(passes: _Passes) -> bool:
    """Say whether the program never asked for the seed: a trainer set it among other things."""
    last = passes[-1]
    seeded = last[min(last)].seeded
    if seeded is None:
        return False
    libraries = takewhile(lambda frame: not frame.user, seeded.frames)
    return any("/torch/" not in f.file and "seed" not in f.function for f in libraries)


# Inputs that ranks should not have in common, and when they may.

_IN_ORDER: Final = "SequentialSampler"
"""What a data loader uses by default; training shuffles."""
_LEAST_PASSES: Final = 4
"""With d batches seen in as many passes, two ranks agree by chance in all with d ** -d: less than
1 % from 4 on."""


def _sampled_exceptions(passes: _Passes) -> Iterator[Allowance]:
    fed = [one for by_rank in passes for one in by_rank.values()]
    if len({one.samples for one in fed}) < _FEWEST:
        yield ONE_BATCH
    if _IN_ORDER in fed[-1].stream:
        yield IN_ORDER


def _other_exceptions(passes: _Passes) -> Iterator[Allowance]:
    fed = [one for by_rank in passes for one in by_rank.values()]
    first = [by_rank[min(by_rank)] for by_rank in passes]
    if len(passes) < _LEAST_PASSES:
        yield FEW_PASSES
    if not are_different(one.inputs for one in first):
        yield ONE_BATCH
    if max((size for one in fed for size in one.batch_sizes), default=0) < _FEWEST:
        yield NO_ROWS
    have_drawn = [all(one.has_drawn for one in by_rank.values()) for by_rank in passes]
    # What was drawn before the first pass is not told of.
    is_drawn = any(map(_draws_its_input, fed)) or sum(have_drawn) >= len(passes) - 1
    if not any(one.stream for one in fed) and is_drawn:
        yield DRAWN
    if sum(map(_have_own_noise, passes)) >= len(passes) - 1:  # that of the first is not seen
        yield OWN_NOISE


def _have_own_noise(by_rank: Mapping[int, ModelFed]) -> bool:
    """Say whether ranks draw different numbers for their inputs; masks of dropout do not count."""
    noise = [
        tuple(draw.state for draw in fed.draws if draw.is_inside and not draw.activation)
        for fed in by_rank.values()
    ]
    return all(noise) and are_different(noise)


def _draws_its_input(fed: ModelFed) -> bool:
    return any(
        not draw.is_inside and draw.sizes and draw.sizes[0] in fed.batch_sizes for draw in fed.draws
    )


def _shared_exceptions(passes: _Passes) -> Iterator[Allowance]:
    batches = [{fed.batch for fed in by_rank.values()} for by_rank in passes]
    if any("" in each for each in batches):
        yield NOT_LOADED
    elif any(len(each) == 1 for each in batches):
        yield PARTS_OF_BATCH


# The aligner.

_NO_FEED: Final = NothingThere("model inputs", "no model was seen to be fed")
_NO_LOADER: Final = NothingThere(
    "data loaders with indices", "no data loader with indices fed a model"
)
_ALL_LOADED: Final = NothingThere(
    "inputs without indices", "all that models were fed came from data loaders with indices"
)
_NO_SHARDS: Final = NothingThere(
    "tensor-parallel inputs", "no model was fed that is sharded along an axis named for it"
)
_NO_DRAWS: Final = NothingThere(
    "random numbers in forward passes", "nothing was drawn for the samples of a training step"
)
_NO_NORMS: Final = NothingThere(
    "batch normalisation", "no layer normalises by the statistics of a batch on one rank"
)
_MOST_PASSES: Final = 8
_SHARING: Final = re.compile(
    r"(^|[_\W])(tp|cp|sp|pp|ulysses|ring|(tensor|context|sequence|pipeline|model)\w*)($|[_\W])"
)
"""Names of process groups and axes whose ranks work on the same samples."""


class _Members(NamedTuple):
    """Ranks that train one model together, along which axis, and how that is known."""

    ranks: RankSet
    axis: Axis
    known_by: str


class RelationAligner(Aligner):
    """Shows inputs and random draws of ranks that train one model together."""

    needs = (ModelFed, Collective, GroupCreated, ModelPlan)
    builds = (SampledInputs, OtherInputs, ReplicatedInputs, MaskView, NormalisedFeeds)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._feeds = SideBySide(job.world)
        self._exchanges = Exchanges()
        self._reduced = ReducedModels()
        self._passes: Recent[tuple[str, RankSet], deque[Mapping[int, ModelFed]]]
        self._passes = Recent(MOST_FOLLOWED, "models that were fed", job.forgotten)
        self._sharing: dict[frozenset[int], None] = {}
        self._shards = ShardGroups()
        self._shared = SideBySide(job.world)
        self._has_norms = False
        self._seen: set[type[View]] = set()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say what was never there."""
        is_fed = bool(self._passes)
        gaps: dict[type[View | Event], Gap] = {}
        for view, gap in (
            (SampledInputs, _NO_LOADER),
            (OtherInputs, _ALL_LOADED),
            (MaskView, _NO_DRAWS),
        ):
            if view not in self._seen:
                gaps[view] = gap if is_fed else _NO_FEED
        if ReplicatedInputs not in self._seen:
            gaps[ReplicatedInputs] = _NO_SHARDS
        if not self._has_norms:
            gaps[NormalisedFeeds] = _NO_NORMS
        return gaps

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case ModelFed():
                self._has_norms |= event.num_local_norms > 0
                alignment = self._feeds.add(event)
                if alignment is not None:
                    yield from self._show(event.model, alignment.by_rank)
                yield from self._feed_shared(event)
            case Collective():
                self._exchanges.feed(event)
            case GroupCreated() if _SHARING.search(event.desc.lower()):
                self._sharing[frozenset(event.ranks)] = None
                self._shards.feed_group(event)
            case ModelPlan():
                self._reduced.feed(event)
                self._shards.feed_plan(event)
                if event.first == 0:
                    self._feed_meshes(event)

    def _feed_meshes(self, plan: ModelPlan) -> None:
        for mesh in {tensor.mesh for tensor in plan.tensors if tensor.mesh is not None}:
            if any(_SHARING.search(name.lower()) for name in mesh.names):
                self._sharing[frozenset(mesh.ranks)] = None

    def _feed_shared(self, fed: ModelFed) -> Iterator[View]:
        """Show the passes of ranks that hold shards of one model along a named axis."""
        ranks, known_by = self._shards.of(fed)
        if len(ranks) < 2:
            return
        alignment = self._shared.add(_Shared(fed.rank, fed.place, tuple(ranks), fed))
        if alignment is None:
            return
        key = f"shards of {fed.model}", ranks
        kept = self._passes.of(key, lambda: deque(maxlen=_MOST_PASSES))
        kept.append({rank: each.fed for rank, each in alignment.by_rank.items()})
        if len(kept) >= _FEWEST:
            self._seen.add(ReplicatedInputs)
            passes = tuple(kept)
            exceptions = tuple(_shared_exceptions(passes))
            yield ReplicatedInputs(
                Item.INPUT, Axis.TENSOR, known_by, fed.model, ranks, passes, exceptions
            )
            found = [(each, draws) for each in passes if (draws := _unequal_masks(each))]
            if any(_inside_draws(one) for each in passes for one in each.values()):
                self._seen.add(MaskView)
                steps, drawn = tuple(each for each, _ in found), tuple(d for _, d in found)
                yield MaskView(Item.MASK, Axis.TENSOR, known_by, fed.model, ranks, steps, (), drawn)

    def _show(self, model: str, by_rank: Mapping[int, ModelFed]) -> Iterator[View]:
        for members in {each for fed in by_rank.values() if (each := self._members(fed))}:
            if members.ranks <= by_rank.keys():
                yield from self._show_group(
                    model, members, {rank: by_rank[rank] for rank in members.ranks}
                )

    def _members(self, fed: ModelFed) -> _Members | None:
        """Return who trains the model together: by its wrapper, or by what the program reduces."""
        if fed.members:
            known_by = f"{fed.model.partition(' ')[0]} keeps its parameters together over them"
            return _Members(RankSet(fed.members), Axis.DATA, known_by)
        ranks, are_all = self._reduced.of(fed)
        if not ranks:
            return None
        known_by = "the program reduces its gradients over them"
        if self._exchanges.are_inside(fed):
            known_by += ", and exchanges activations in the forward pass"
            return _Members(RankSet(ranks), Axis.SEQUENCE, known_by)
        return _Members(RankSet(ranks), Axis.DATA, known_by) if are_all else None

    def _show_group(
        self, model: str, members: _Members, by_rank: Mapping[int, ModelFed]
    ) -> Iterator[View]:
        ranks = members.ranks
        kept = self._passes.of((model, ranks), lambda: deque(maxlen=_MOST_PASSES))
        kept.append(by_rank)
        passes = tuple(kept)
        fed = [one for each in passes for one in each.values()]
        is_shared = any(len(group & set(ranks)) > 1 for group in self._sharing)
        is_shared = is_shared or any(map(self._exchanges.are_for, fed))
        if len(passes) < _FEWEST:
            return
        exceptions = [SHARED_WORK] if is_shared else []
        yield from self._inputs(model, members, passes, exceptions)
        yield from self._masks(model, members, passes, exceptions)
        if self._has_norms:
            yield NormalisedFeeds(model, ranks, passes, is_shared)

    def _inputs(
        self, model: str, members: _Members, passes: _Passes, exceptions: list[Allowance]
    ) -> Iterator[View]:
        if members.axis is not Axis.DATA:
            return
        is_sampled = all(fed.batch for each in passes for fed in each.values())
        kind = SampledInputs if is_sampled else OtherInputs
        self._seen.add(kind)
        more = _sampled_exceptions(passes) if is_sampled else _other_exceptions(passes)
        ranks, axis, known_by = members
        yield kind(Item.INPUT, axis, known_by, model, ranks, passes, (*exceptions, *more))

    def _masks(
        self, model: str, members: _Members, passes: _Passes, exceptions: list[Allowance]
    ) -> Iterator[View]:
        if any(fed.draws for each in passes for fed in each.values()):
            self._seen.add(MaskView)
        ranks, axis, known_by = members
        own = [each for each in passes if are_different(fed.inputs for fed in each.values())]
        has_parts = all(self._exchanges.have_parts(f) for each in passes for f in each.values())
        if has_parts:
            axis, own = Axis.SEQUENCE, list(passes)
        masks = [(each, draws) for each in own if (draws := _equal_masks(each))]
        noise = [(each, draws) for each in own if (draws := _equal_noise(each))]
        seeded = [SEEDED_BY_LIBRARY] if _has_library_seed(passes) else []
        # What is drawn for no activation may be intended for all of a batch.
        exceptions = [*exceptions, *seeded]
        if any(_may_be_samples(each, d) for each, draws in noise for d in draws.values()):
            exceptions.append(DIVIDED_LATER)
        for found, doubts in ((masks, seeded), (noise, exceptions)):
            steps = tuple(each for each, _ in found)
            drawn = tuple(draws for _, draws in found)
            if len({draw.state for draws in drawn for draw in draws.values()}) >= _FEWEST:
                view = MaskView(
                    Item.MASK, axis, known_by, model, ranks, steps, tuple(doubts), drawn
                )
                yield view
                return
