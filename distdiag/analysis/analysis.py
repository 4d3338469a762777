"""From paths to one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from distdiag.alignment import Fate, RankState
from distdiag.analysis.evidence import Evidence, gather
from distdiag.analysis.timeline import Timeline
from distdiag.any_event import AnyEvent
from distdiag.attendance import Attendance
from distdiag.checks import load_checks
from distdiag.engine import Engine
from distdiag.event import Collective, Event, RankStarted, TorchLoaded
from distdiag.finding import Outcome, RankInfo, Report, Run
from distdiag.last_act import last_act
from distdiag.ranks import RankSet
from distdiag.selection import Selection

_NOT_TOLD: Final = {"COL005": "reduce_op", "COL006": "root"}
"""What a check needs that a flight recorder leaves out."""


def analyze(
    paths: Sequence[Path],
    *,
    told: Mapping[str, int] | None = None,
    selection: Selection | None = None,
    progress: Callable[[int], None] = lambda num_files: None,
    complain: Callable[[str], None] = lambda problem: None,
) -> Report:
    """Judge what a job left below these paths.

    `told` are the ranks of files whose names and content do not tell, by path or end of a path;
    `progress` is told how many files have been read, and `complain` gets one line for each that
    cannot be used. These are in the report, too.

    Raises:
        UsageError: there is nothing that can be judged, or the selection fits no check.

    """
    catalogue = load_checks()
    selection = selection or Selection()
    selection.validate(catalogue)
    evidence = gather(paths, told or {}, progress)
    for problem in evidence.problems:
        complain(problem)
    engine = Engine(
        [check() for code, check in catalogue.items() if selection.selects(code)],
        evidence.observed,
    )
    roll = _Roll(evidence.observed)
    timeline = Timeline(engine, roll.feed)
    timeline.feed(evidence.sources())
    timeline.stand_still(evidence.pause_s())
    roll.attendance.settle(is_hung=engine.is_hung)
    timeline.end()
    needs = {code: check.needs for code, check in catalogue.items()}
    gaps = evidence.gaps | _left_out(catalogue, selection) | engine.not_checked
    gaps |= roll.gaps({code: needs[code] for code in engine.checked})
    return _report(evidence, engine, roll, gaps)


def _left_out(codes: Iterable[str], selection: Selection) -> dict[str, str]:
    reason = "left out by --select or --ignore"
    return {code: reason for code in codes if not selection.selects(code)}


class _Roll:
    """What the events say of the run as a whole."""

    def __init__(self, ranks: RankSet) -> None:
        self.attendance = Attendance(ranks)
        self.torch = ""
        self.started_ns = 0
        self.command: tuple[str, ...] = ()
        self._kinds: set[type[Event]] = set()
        self._told: set[str] = set()

    def feed(self, event: AnyEvent) -> None:
        self._kinds.add(type(event))
        self.attendance.feed(event)
        match event:
            case Collective():
                self._hear(event)
            case TorchLoaded():
                self.torch = event.torch
            case RankStarted():
                self.command = self.command or event.command
                self.started_ns = min(self.started_ns or event.unix_ns, event.unix_ns)

    def _hear(self, call: Collective) -> None:
        self.started_ns = self.started_ns or call.time_ns
        if len(self._told) < len(_NOT_TOLD):
            fields = ("reduce_op", call.signature.reduce_op), ("root", call.signature.root)
            self._told |= {name for name, value in fields if value is not None}

    def gaps(self, needs: Mapping[str, tuple[type[Event], ...]]) -> dict[str, str]:
        """Return which checks had nothing to judge."""
        gaps = {
            code: f"no {' or '.join(kind.__name__ for kind in kinds)} is in the files"
            for code, kinds in needs.items()
            if code[:3] != "DIA" and not any(issubclass(seen, kinds) for seen in self._kinds)
        }
        untold = {code: part for code, part in _NOT_TOLD.items() if part not in self._told}
        return gaps | {
            code: f"no file tells the {part} of a collective"
            for code, part in untold.items()
            if code in needs
        }


def _report(evidence: Evidence, engine: Engine, roll: _Roll, gaps: dict[str, str]) -> Report:
    states = engine.states()
    members = evidence.members
    silent = RankSet({*members, *engine.unobserved} - set(evidence.observed))
    if silent:
        gaps[silent.phrase()] = "nothing of them was found"
    for rank, state in states.items():
        if state.incomplete:
            gaps[f"rank {rank}"] = f"not observed wholly: {state.incomplete}"
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    started = datetime.fromtimestamp(roll.started_ns / 1e9, UTC)
    return Report(
        complete=True,
        run=Run(
            id=", ".join(str(folder.run_dir.root.name) for folder in evidence.folders) or "dumps",
            command=roll.command,
            world_size=max([*members, *engine.unobserved]) + 1,
            ranks=tuple(_rank_info(state, len(members)) for state in states.values()),
            torch=roll.torch,
            started=started.isoformat(timespec="milliseconds") if roll.started_ns else now,
            ended=None,
            outcome=_outcome(engine, roll),
        ),
        findings=engine.findings,
        checked=tuple(code for code in engine.checked if code not in gaps),
        not_checked=gaps,
        silent_ranks=RankSet([*silent, *(r for r, s in states.items() if s.fate is Fate.SILENT)]),
    )


def _outcome(engine: Engine, roll: _Roll) -> Outcome:
    outcome = roll.attendance.outcome
    if outcome is Outcome.RUNNING and engine.is_hung:
        return Outcome.HUNG
    return outcome


def _rank_info(state: RankState, world_size: int) -> RankInfo:
    started = state.started
    return RankInfo(
        rank=state.rank,
        local_rank=started.local_rank if started else -1,
        world_size=started.world_size if started else world_size,
        hostname=started.hostname if started else "",
        pid=started.pid if started else 0,
        fate=state.fate,
        last=last_act(state),
    )
