"""What the engine knows of the data that ranks are fed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Final

from distdiag.engine.aligner import Watch
from distdiag.engine.runner import Judges
from distdiag.engine.side_by_side import SideBySide
from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import Collective, GroupCreated, Signature
from distdiag.events.data import EpochFed, ModelFed, RowsGathered, ScheduleState
from distdiag.events.lifecycle import ProbeDisabled, SteppedAlone
from distdiag.events.models import ModelPlan
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Alignment
from distdiag.views.data import FeedView

# Which ranks train without anything that connects them, though they were launched together.


class LoneSteps(Watch):
    """Judges ranks that stepped alone, once all have or at the end, and never met before or since.

    A group that was made before is none that connects them: their library may not use it.
    """

    kinds = (Collective, GroupCreated, ProbeDisabled, SteppedAlone)

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Nobody has stepped yet."""
        self._world = world
        self._judges = judges
        self._alone: dict[int, SteppedAlone] = {}
        self._connected: set[int] = set()
        self._blind: set[int] = set()

    @property
    def not_checked(self) -> dict[str, str]:
        """The check of first steps, if those of some rank were not seen."""
        if not self._blind:
            return {}
        why = f"the steps of {RankSet(self._blind).phrase()} are not observed"
        return {check.code: why for check in self._judges.needing(SteppedAlone)}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case SteppedAlone():
                self._alone[event.rank] = event
                if self._alone.keys() >= set(self._world):
                    self._judge()
            case ProbeDisabled(probe="steps"):
                self._blind.add(event.rank)
            case Collective():
                self._connect(event.rank)
            case GroupCreated() if event.rank in self._alone:
                self._connect(event.rank)

    def finish(self) -> None:
        """Judge those that stepped, though others never did."""
        if self._alone:
            self._judge()

    def _connect(self, rank: int) -> None:
        if rank not in self._connected:
            self._connected.add(rank)
            if rank in self._alone:
                self._judge()

    def _judge(self) -> None:
        alone = {r: e for r, e in sorted(self._alone.items()) if r not in self._connected}
        self._judges.judge_lone_steps(Alignment("step", ("first",), alone, self._world))


# ---

_MOST_CALLS: Final = 64
_MOST_PASSES: Final = 8
_REDUCTIONS: Final = ("all_reduce", "allreduce", "reduce")
_NO_EXCHANGES: Final = ("barrier", "broadcast")
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
        self._calls: dict[int, deque[tuple[int, int, bool]]] = {}
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
        if call.signature.op.startswith(_NO_EXCHANGES):
            return
        is_reduction = call.signature.op.startswith(_REDUCTIONS)
        num_rows = _num_rows(call.signature)
        if len(call.group.ranks) < 2 or (is_reduction and num_rows < 2):
            return
        known = self._is_foreign.get(id(call.site))
        if known is None:
            # Kept with its site: the id must not come to belong to another one.
            known = self._is_foreign[id(call.site)] = (_is_foreign(call.site), call.site)
        if known[0]:
            known_calls = self._calls.setdefault(call.rank, deque(maxlen=_MOST_CALLS))
            known_calls.append((call.seq, num_rows, is_reduction))

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
        """Say whether a rank has sent more than gradients and parameters for these samples."""
        fewest = min(fed.batch_sizes, default=0)
        for seq, num_rows, is_reduction in self._calls.get(fed.rank, ()):
            if fed.begin <= seq < fed.end and not is_reduction:
                return True
            # Before the forward pass: what was found for each sample, such as rewards of answers.
            if 0 <= fed.since <= seq < fed.begin and num_rows >= max(fewest, 2):
                return True
        return False


def _num_rows(signature: Signature) -> int:
    """Return how many rows the tensors have that a rank gives, 0 for single figures."""
    return max((sizes[0] for sizes in signature.input_sizes if sizes), default=0)


def _is_foreign(site: CallSite) -> bool:
    """Say whether something else than a wrapper, a norm or an optimizer of torch's calls."""
    caller = next((f.file for f in site.frames if not f.file.endswith(_FRONTS)), "")
    return not any(own in caller for own in _OWN_FILES)
