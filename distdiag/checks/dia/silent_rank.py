"""DIA002: nothing was ever heard of a rank."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.collectives import GroupCreated
from distdiag.events.lifecycle import ProcessesSpawned, RankStarted
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.rank_states import Fate, JobView, LaunchView


class SilentRank(Check[LaunchView | JobView]):
    """Nothing was ever heard of a rank.

    ## What it detects
    At the end of a run, ranks of the job that wrote no event at all. And at once, as a note, a
    process group that has more ranks than are observed, and ranks that the script starts by itself.

    ## Why it matters
    Whatever those ranks did is not in the report, and what was compared leaves them out.

    ## Example
    Two of three nodes were started through the tool, the third one was not; or the run directory of
    a node was lost. Or `python -m distdiag.check` runs a script of Lightning, which starts the
    other ranks by itself, or one that calls `torch.multiprocessing.spawn`.

    ## How to fix
    Start every rank through the tool, with one run directory that each node can write to. A script
    that starts its ranks by itself is started by `torchrun --nproc-per-node N -m distdiag.check`
    instead: Lightning then starts none, and `spawn` must be left out.

    ## References
    - `distdiag doctor`
    """

    code = "DIA002"
    name = "silent-rank"
    severity = Severity.WARNING

    why = "A rank without records was not observed; the other ranks were compared without it."
    fix = "Start the script through the tool on every rank, with a run directory it can write to."
    fix_changes = "The rank is compared with the others."
    fix_leaves = "What happened on the rank in this run stays unknown."
    disproof = "The run directory holds an event file of the rank."

    def check(self, view: LaunchView | JobView) -> Iterator[Finding]:
        """Judge what the view shows."""
        match view:
            case LaunchView():
                yield from self._check_event(view)
            case JobView():
                yield from self._check_ranks(view)

    def _check_event(self, view: LaunchView) -> Iterator[Finding]:
        """Name the ranks that the job has beside those that are observed."""
        event, states = view.event, view.states
        started = states[event.rank].started
        is_alone = started is not None and started.world_size == 1
        match event:
            case GroupCreated() if event.has_processes and len(event.scope) > len(states):
                unseen = RankSet(set(event.scope) - set(states))
                verb = "is" if len(unseen) == 1 else "are"
                message = f"{unseen.phrase()} of {len(event.scope)} {verb} not observed"
                fix = _under_torchrun(started, len(event.scope)) if is_alone else ""
            case ProcessesSpawned() if len(states) == 1 and is_alone:
                unseen = RankSet(range(event.number))
                message = (
                    "torch.multiprocessing starts the ranks, and none of them is observed: rank 0 "
                    "of this report is the process that starts them"
                )
                fix = f"{_under_torchrun(started, event.number)}, without torch.multiprocessing"
            case _:
                return
        seen = Evidence(
            ranks=RankSet([event.rank]),
            summary=f"here it begins with {unseen.phrase()}",
            location=user_location(event.site.frames),
        )
        yield self.finding(
            f"{message}; {fix}" if fix else message,
            ranks=unseen,
            grade=Grade.NOTE,
            confidence=1.0,
            evidence=(seen,),
            fix=f"{fix[:1].upper()}{fix[1:]}" if fix else self.fix,
        )

    def _check_ranks(self, view: JobView) -> Iterator[Finding]:
        """Name the silent ranks once no rank runs any more."""
        states = view.states
        # Why a rank has no agent DIA003 says.
        silent = RankSet(
            s.rank
            for s in states.values()
            if s.fate is Fate.SILENT and not s.incomplete.startswith("agent: ")
        )
        if not silent or any(state.fate is Fate.RUNNING for state in states.values()):
            return
        yield self.finding(
            f"no event of {silent.phrase()} was ever read",
            ranks=silent,
            confidence=1.0,
            evidence=(Evidence(ranks=silent, summary="no event file, or an empty one"),),
        )


def _under_torchrun(started: RankStarted | None, num_ranks: int) -> str:
    command = shlex.join(started.command) if started else ""
    return (
        "let torchrun start all ranks: "
        f"torchrun --nproc-per-node {num_ranks} -m distdiag.check {command or 'train.py'}"
    )
