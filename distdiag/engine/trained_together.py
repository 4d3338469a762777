"""Copies that nothing tells of, known by what lies beside them and is trained together.

A weight that several ranks train and that stays the same on all of them is one that they share. So
is a bias by which a router of theirs chooses experts, and so is a router that is marked as a part
of one rank's experts although the rest of its layer is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from distdiag.engine.siblings import differs
from distdiag.event import CallSite
from distdiag.model_event import Basis, Content, Moment, TensorPlan
from distdiag.model_view import Disagreement, ReplicaView
from distdiag.ranks import RankSet
from distdiag.reasoning.copies import Copies, are_equal
from distdiag.reasoning.experts import is_of_expert, layer_of, spreading_routers

_FEWEST: Final = 8
_ROUNDING: Final = 1e-5
_MOVED: Final = 1e-4
"""What decays alone is multiplied by one factor, but for so much of its largest value."""

Held = Mapping[str, tuple[TensorPlan, Content]]


class TrainedTogether:
    """Compares biases and routers beside weights that ranks train together."""

    def __init__(self) -> None:
        """Know of no model yet."""
        self._starts: dict[str, dict[int, Held]] = {}
        self._looks: dict[str, tuple[int, dict[int, Held]]] = {}
        self._sites: dict[tuple[str, int], CallSite] = {}
        self._shown: set[tuple[str, Basis, tuple[int, ...]]] = set()

    def add(
        self,
        place: tuple[str, Moment, int],
        rank: int,
        pairs: Iterable[tuple[TensorPlan, Content]],
        site: CallSite,
    ) -> Iterator[ReplicaView]:
        """Take in what a rank holds of a model at a moment; yield what should be the same."""
        model, moment, step = place
        if moment not in (Moment.START, Moment.STEP):
            return
        held = {plan.name: (plan, content) for plan, content in pairs if not plan.tied_to}
        start = self._starts.setdefault(model, {})
        if moment is Moment.START:
            start[rank] = held
            return
        last, now = self._looks.get(model, (-1, {}))
        if step > last:  # what ranks have told of an earlier step is given up
            now = {}
        if step >= last:
            self._looks[model] = step, now | {rank: held}
            self._sites[model, rank] = site
            yield from self._views(model)

    def _views(self, model: str) -> Iterator[ReplicaView]:
        start, (step, now) = self._starts[model], self._looks[model]
        if now.keys() != start.keys():
            return
        for basis, ranks, found in (*_biases(start, now), *_routers(start, now)):
            if found and (model, basis, ranks) not in self._shown:
                self._shown.add((model, basis, ranks))
                yield ReplicaView(
                    model=model,
                    moment=Moment.STEP,
                    step=step,
                    basis=basis,
                    ranks=RankSet(ranks),
                    tensors=found,
                    num_compared=len(found),
                    alike_at=0,
                    sites={rank: self._sites[model, rank] for rank in ranks},
                )


_Found = tuple[Basis, tuple[int, ...], tuple[Disagreement, ...]]


def _biases(start: Mapping[int, Held], now: Mapping[int, Held]) -> Iterator[_Found]:
    """Yield biases of routers, for each set of ranks that train their routers together."""
    found: dict[tuple[int, ...], list[Disagreement]] = {}
    names = {n for held in now.values() for n, (plan, _) in held.items() if _is_told_by(plan)}
    for name in sorted(names):
        ranks = [rank for rank, held in now.items() if name in held]
        for camp in _camps(name, start, {rank: now[rank] for rank in ranks}):
            begun, copies = _of(name, start, camp), _of(name, now, camp)
            if len(begun) == len(copies) and are_equal(begun):
                plan = copies[camp[0]][0]
                by_rank = {rank: content for rank, (_, content) in copies.items()}
                if differs(plan, by_rank, _ROUNDING):
                    found.setdefault(camp, []).append(Disagreement(plan, by_rank))
    for camp, tensors in found.items():
        yield Basis.ROUTER, camp, tuple(tensors)


def _is_told_by(plan: TensorPlan) -> bool:
    return plan.is_routing_bias and plan.basis is Basis.WORLD


def _camps(
    name: str, start: Mapping[int, Held], now: Mapping[int, Held]
) -> Iterator[tuple[int, ...]]:
    """Yield the sets of ranks that train the router of a bias together."""
    camps: dict[str, list[int]] = {}
    for rank, held in now.items():
        router = _router_of(held[name][0], held)
        if router is not None and _has_moved(start[rank].get(router), held[router]):
            camps.setdefault(held[router][1].digest, []).append(rank)
    yield from (tuple(sorted(camp)) for camp in camps.values() if len(camp) > 1)


def _router_of(bias: TensorPlan, held: Held) -> str | None:
    module = bias.name.rpartition(".")[0]
    for name, (plan, _) in held.items():
        is_near = name.startswith(f"{module}." if module else "")
        is_router = plan.requires_grad and len(plan.shape) > 1 and bias.shape[-1] in plan.shape
        if is_near and is_router and not is_of_expert(plan):
            return name
    return None


def _routers(start: Mapping[int, Held], now: Mapping[int, Held]) -> Iterator[_Found]:
    """Yield routers marked as own parts in layers whose rest all ranks train together."""
    ranks = tuple(sorted(now))
    own = {n: p for n, (p, _) in now[ranks[0]].items() if p.basis is Basis.OWN}
    routers = _spreading(now)
    dense = {name for name, plan in own.items() if not is_of_expert(plan)}
    if not dense or dense - routers or len(ranks) < 2:
        return  # who trains other parts for itself may mean the routers, too
    begun = {name: _of(name, start, ranks) for name in _shared(now)}
    shared = [name for name, each in begun.items() if len(each) == len(ranks)]
    if any(not are_equal(_of(name, now, ranks)) for name in shared if name not in dense):
        return
    moved = [n for n in shared if all(_has_moved(start[r].get(n), now[r][n]) for r in ranks)]
    found = [
        Disagreement(own[name], {rank: now[rank][name][1] for rank in ranks})
        for name in sorted(dense)
        if name in shared and are_equal(begun[name]) and not _is_constant(begun[name])
        if any(n.startswith(_block_of(name)) for n in moved if n not in dense)
    ]
    yield Basis.LAYER, ranks, tuple(d for d in found if differs(d.plan, d.by_rank, _ROUNDING))


def _spreading(now: Mapping[int, Held]) -> frozenset[str]:
    """Return the routers that know experts of other ranks, on all ranks."""
    plans = [[plan for plan, _ in held.values()] for held in now.values()]
    return frozenset.intersection(*(spreading_routers(each) for each in plans))


def _shared(now: Mapping[int, Held]) -> Iterator[str]:
    """Yield the trained parameters that are parts of no rank, but for routers marked so."""
    held = next(iter(now.values()))
    for name, (plan, _) in held.items():
        is_kept = bool(plan.replicas) or plan.basis is Basis.OWN
        is_dense = plan.requires_grad and is_kept and not is_of_expert(plan)
        if is_dense and all(name in each for each in now.values()):
            yield name


def _block_of(router: str) -> str:
    """Return the beginning of the names in the block that the layer of a router stands in."""
    block = layer_of(router).rpartition(".")[0]
    return f"{block}." if block else ""


def _of(name: str, held: Mapping[int, Held], ranks: tuple[int, ...]) -> Copies:
    return {rank: held[rank][name] for rank in ranks if name in held[rank]}


def _is_constant(copies: Copies) -> bool:
    return any(content.least == content.greatest for _, content in copies.values())


def _has_moved(
    before: tuple[TensorPlan, Content] | None, after: tuple[TensorPlan, Content]
) -> bool:
    """Say whether training has changed a weight otherwise than by one factor."""
    if before is None or after[1].num_elements < _FEWEST:
        return False
    early, late = before[1], after[1]
    peaks = [max(abs(c.least), abs(c.greatest)) for c in (early, late)]
    if not all(0 < peak < float("inf") for peak in peaks) or early.digest == late.digest:
        return False
    factor = peaks[1] / peaks[0]
    figures = [(c.least, c.greatest, c.mean) for c in (early, late)]
    return any(abs(b - factor * a) > _MOVED * peaks[1] for a, b in zip(*figures, strict=True))
