"""What the engine knows of the data that ranks are fed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Final

from distdiag.data_event import EpochFed, ModelFed, RowsGathered, ScheduleState
from distdiag.data_view import FeedView
from distdiag.engine.judges import Judges
from distdiag.engine.side_by_side import SideBySide
from distdiag.engine.watch import Watch
from distdiag.event import CallSite, Collective, Event, GroupCreated
from distdiag.model_event import ModelPlan
from distdiag.ranks import RankSet

_MOST_CALLS: Final = 64
_MOST_PASSES: Final = 8
_REDUCTIONS: Final = ("all_reduce", "allreduce", "barrier", "reduce", "broadcast")
_OWN_FILES: Final = ("/torch/distributed/fsdp/", "/torch/nn/", "/torch/optim/", "/deepspeed/")
_FRONTS: Final = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/nn/functional.py",
    "/torch/_ops.py",
    "/contextlib.py",
)
_SHARING: Final = re.compile(
    r"(^|[_\W])(tp|cp|sp|pp|ulysses|ring|(tensor|context|sequence|pipeline|model)\w*)($|[_\W])"
)
"""Names of process groups and axes whose ranks work on the same samples."""


class DataWatch(Watch):
    """Feed events as they come; what is complete is judged at once, the rest at the end."""

    kinds = (ModelFed, EpochFed, ScheduleState, RowsGathered, Collective, GroupCreated, ModelPlan)

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Watch what these ranks are fed."""
        self._judges = judges
        self._events = SideBySide(world)
        self._feeds = SideBySide(world)
        self._passes: dict[tuple[str, RankSet], deque[Mapping[int, ModelFed]]] = {}
        self._calls: dict[int, deque[int]] = {}
        self._is_foreign: dict[int, tuple[bool, CallSite]] = {}
        self._sharing: list[frozenset[int]] = []

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case ModelFed():
                alignment = self._feeds.add(event)
                if alignment is not None and event.members:
                    self._judge_feeds(event.model, alignment.by_rank)
            case EpochFed() | ScheduleState() | RowsGathered():
                alignment = self._events.add(event)
                if alignment is not None:
                    self._judges.judge(alignment)
            case Collective():
                self._feed_call(event)
            case GroupCreated() if _SHARING.search(event.desc.lower()):
                self._sharing.append(frozenset(event.ranks))
            case ModelPlan(first=0):
                self._feed_plan(event)

    def finish(self) -> None:
        """Judge what not all ranks have told."""
        for alignment in self._events.rest():
            self._judges.judge(alignment)

    def _feed_plan(self, plan: ModelPlan) -> None:
        for mesh in {tensor.mesh for tensor in plan.tensors if tensor.mesh is not None}:
            if any(_SHARING.search(name.lower()) for name in mesh.names):
                self._sharing.append(frozenset(mesh.ranks))

    def _feed_call(self, call: Collective) -> None:
        if call.signature.op.startswith(_REDUCTIONS) or len(call.group.ranks) < 2:
            return
        known = self._is_foreign.get(id(call.site))
        if known is None:
            # Kept with its site: the id must not come to belong to another one.
            known = self._is_foreign[id(call.site)] = (_is_foreign(call.site), call.site)
        if known[0]:
            self._calls.setdefault(call.rank, deque(maxlen=_MOST_CALLS)).append(call.seq)

    def _judge_feeds(self, model: str, by_rank: Mapping[int, ModelFed]) -> None:
        ranks = RankSet(by_rank)
        passes = self._passes.setdefault((model, ranks), deque(maxlen=_MOST_PASSES))
        passes.append(by_rank)
        is_shared = any(len(group & set(ranks)) > 1 for group in self._sharing)
        fed = [fed for each in passes for fed in each.values()]
        is_shared = is_shared or any(map(self._exchanges, fed))
        if len(passes) > 1:
            self._judges.judge_feeds(FeedView(model, ranks, tuple(passes), is_shared))

    def _exchanges(self, fed: ModelFed) -> bool:
        """Say whether a rank has sent more than gradients and parameters in a forward pass."""
        return any(fed.begin <= seq < fed.end for seq in self._calls.get(fed.rank, ()))


def _is_foreign(site: CallSite) -> bool:
    """Say whether something else than a wrapper, a norm or an optimizer of torch's calls."""
    caller = next((f.file for f in site.frames if not f.file.endswith(_FRONTS)), "")
    return not any(own in caller for own in _OWN_FILES)
