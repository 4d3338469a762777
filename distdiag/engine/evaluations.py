"""What ranks make of metrics: whether those of all ranks are in them, and what goes by them."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere
from distdiag.engine.bounded import BySite, Recent
from distdiag.engine.relations import is_foreign
from distdiag.engine.side_by_side import SideBySide
from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import Collective
from distdiag.events.data import EpochFed, MetricGiven
from distdiag.events.files import FileAccess, FileAction, StoreCall
from distdiag.events.lifecycle import EventsLost, StepEnd
from distdiag.events.models import OptimizerState
from distdiag.views.base import View
from distdiag.views.data import LocalEvaluationView, MetricView

_MAKING: Final = frozenset({FileAction.WRITE, FileAction.RENAME, FileAction.LINK})
_ADDING: Final = _MAKING | {FileAction.APPEND}
_MOST_WRITES: Final = 256
_MOST_PASSES: Final = 256
_MOST_PATHS: Final = 10_000
_MOST_READS: Final = 4096
"""Of what a rank did so much is remembered; a training evaluates and saves far less often."""


@dataclass(slots=True)
class _Rank:
    """What one rank did, by event numbers."""

    heard: int = -1
    """When it last heard of others: by a collective of the program's, or the store."""
    stepped: int = -1
    has_called: bool = False
    """It has made a collective: ranks that exchange by another library are not seen to do so."""
    writes: deque[tuple[FileAccess, int, int]] = field(
        default_factory=lambda: deque(maxlen=_MOST_WRITES)
    )
    """Each with what `heard` and `stepped` were then."""
    reads: deque[FileAccess] = field(default_factory=lambda: deque(maxlen=_MOST_READS))


class EvaluationAligner(Aligner):
    """Evaluations of parts that decide what is written, and values that schedulers go by."""

    needs = (
        Collective,
        EpochFed,
        EventsLost,
        FileAccess,
        MetricGiven,
        OptimizerState,
        StepEnd,
        StoreCall,
    )
    builds = (LocalEvaluationView, MetricView)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._ranks = {rank: _Rank() for rank in job.world}
        self._passes: dict[tuple[str, int], dict[int, EpochFed]] = {}
        self._metrics = SideBySide(job.world)
        self._members: set[int] = set()
        self._writers: Recent[str, set[int]] = Recent(_MOST_PATHS)
        self._is_foreign = BySite(is_foreign)
        self._has_metric = False
        self._has_forgotten = False

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say what was never there."""
        gaps: dict[type[View | Event], Gap] = {}
        if not any(each.sampler.num_replicas for p in self._passes.values() for each in p.values()):
            gaps[LocalEvaluationView] = _NO_PARTS
        if not self._has_metric:
            gaps[MetricView] = _NO_METRIC
        return gaps

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        mine = self._ranks[event.rank]
        match event:
            case StepEnd():
                mine.stepped = event.seq
            case Collective():
                mine.has_called |= len(event.group.ranks) > 1
                if self._exchanges(event):
                    mine.heard = event.seq
            case StoreCall(done=True):
                mine.heard = event.seq
            case MetricGiven():
                yield from self._feed_metric(event)
            case _:
                self._feed_rare(mine, event)

    def _feed_rare(self, mine: _Rank, event: Event) -> None:
        match event:
            case FileAccess():
                self._feed_access(mine, event)
            case OptimizerState():
                self._members.update(event.members)
            case EpochFed(num_backwards=0) if event.begin >= 0:
                if len(self._passes) >= _MOST_PASSES:
                    del self._passes[next(iter(self._passes))]
                self._passes.setdefault(event.place, {})[event.rank] = event
            case EventsLost():
                mine.writes.clear()  # it may have heard of others meanwhile
                self._passes.clear()

    def end(self) -> Iterator[View]:
        """Show what was written after evaluations: passes are told of when the next one begins."""
        parts = [each for each in self._passes.values() if _are_parts(each)]
        found: dict[CallSite, tuple[dict[int, EpochFed], dict[int, FileAccess]]] = {}
        counts: Counter[CallSite] = Counter()
        for rank, mine in self._ranks.items():
            for write, heard, stepped in mine.writes if mine.has_called else ():
                passes = _last_before(write, rank, parts)
                begin = passes[rank].begin if passes else write.seq
                if passes is not None and max(heard, stepped, self._read(mine, write)) < begin:
                    counts[write.site] += 1
                    found.setdefault(write.site, (passes, {}))[1][rank] = write
        for site, (passes, writes) in found.items():
            yield LocalEvaluationView(dict(sorted(passes.items())), writes, counts[site])

    def _feed_access(self, mine: _Rank, access: FileAccess) -> None:
        if access.action in _ADDING:
            self._has_forgotten |= len(self._writers) == _MOST_PATHS
            self._writers.of(access.path, set).add(access.rank)
        if access.action in _MAKING:
            mine.writes.append((access, mine.heard, mine.stepped))
        else:
            mine.reads.append(access)

    def _read(self, mine: _Rank, write: FileAccess) -> int:
        """Return when a rank had last, before a write, to do with a file that another one wrote."""
        return max(
            (
                each.seq
                for each in mine.reads
                if each.seq < write.seq and self._may_be_of_others(each)
            ),
            default=-1,
        )

    def _may_be_of_others(self, access: FileAccess) -> bool:
        writers = self._writers.get(access.path)
        return self._has_forgotten if writers is None else bool(writers - {access.rank})

    def _exchanges(self, call: Collective) -> bool:
        if len(call.group.ranks) < 2 or call.signature.op.startswith("barrier"):
            return False
        return self._is_foreign.of(call.site)

    def _feed_metric(self, event: MetricGiven) -> Iterator[View]:
        self._has_metric = True
        alignment = self._metrics.add(event)
        if alignment is not None:
            given = {r: each for r, each in alignment.by_rank.items() if r in self._members}
            if len(given) > 1:
                yield MetricView(given)


def _are_parts(passes: Mapping[int, EpochFed]) -> bool:
    """Say whether ranks have iterated over parts of one data set, each over another one."""
    samplers = [each.sampler for each in passes.values()]
    places = {sampler.replica for sampler in samplers if (sampler.num_replicas or 1) > 1}
    return len(places - {None}) > 1 and len({each.digest for each in passes.values()}) > 1


def _last_before(
    write: FileAccess, rank: int, parts: list[dict[int, EpochFed]]
) -> dict[int, EpochFed] | None:
    ended = [p for p in parts if rank in p and 0 <= p[rank].end <= write.seq]
    return max(ended, key=lambda passes: passes[rank].end, default=None)


_NO_PARTS: Final = NothingThere("evaluations of parts", "no part of a data set was evaluated")
_NO_METRIC: Final = NothingThere("metrics", "no scheduler was given a metric")
