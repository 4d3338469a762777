"""DIA002: a rank of the job recorded no events."""

import shlex
from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.collectives import GroupCreated
from distdiag.events.lifecycle import RankStarted
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.record.redaction import redacted
from distdiag.views.rank_states import JobView, LaunchView, RankStatus


class SilentRank(Check[LaunchView | JobView]):
    """A rank of the job recorded no events.

    ## What you see
    The report does not cover this rank: the other ranks were compared without it. The tool was not
    started on this rank, or left no records there.

    ## Example
        # wrong: one of two nodes starts its ranks without the tool
        torchrun --nnodes 2 --nproc-per-node 4 -m distdiag.check train.py
        torchrun --nnodes 2 --nproc-per-node 4 train.py

        # right: both nodes do it through the tool
        torchrun --nnodes 2 --nproc-per-node 4 -m distdiag.check train.py

    ## How to fix
    Start the script through distdiag on every rank:
    `torchrun --nproc-per-node N -m distdiag.check train.py`. If a script starts ranks by itself,
    distdiag observes only those on the same machine.

    Changes: The rank is compared with the others.

    Leaves: What happened on the rank in this run stays unknown.

    ## When it is not a defect
    The run directory holds an event file of the rank.

    To silence it, set `ignore = ["DIA002"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/elastic/run.html
    """

    code = "DIA002"
    name = "silent-rank"
    severity = Severity.WARNING

    def check(self, view: LaunchView | JobView) -> Iterator[Finding]:
        """Name unobserved ranks when the job begins, and silent ones when it has ended."""
        if isinstance(view, LaunchView):
            yield from self._unobserved_ranks(view)
        else:
            yield from self._silent_ranks(view)

    def _unobserved_ranks(self, view: LaunchView) -> Iterator[Finding]:
        event, states = view.event, view.states
        started = states[event.rank].started
        is_alone = started is not None and started.world_size == 1
        match event:
            case GroupCreated() if event.has_processes and len(event.scope) > len(states):
                unseen = RankSet(set(event.scope) - set(states))
                verb = "is" if len(unseen) == 1 else "are"
                message = f"{unseen.phrase()} of {len(event.scope)} {verb} not observed"
                fix = _under_torchrun(started, len(event.scope)) if is_alone else ""
            case _:
                return
        seen = Evidence(
            ranks=RankSet([event.rank]),
            summary=f"creates a process group with {unseen.phrase()} here",
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

    def _silent_ranks(self, view: JobView) -> Iterator[Finding]:
        states = view.states
        # DIA003 reports why a rank has no agent.
        silent = RankSet(
            s.rank
            for s in states.values()
            if s.status is RankStatus.SILENT and not s.incomplete.startswith("agent: ")
        )
        if not silent or any(state.status is RankStatus.RUNNING for state in states.values()):
            return
        yield self.finding(
            f"{silent.phrase()} recorded no events",
            ranks=silent,
            confidence=1.0,
            evidence="no event file, or an empty one",
        )


def _under_torchrun(started: RankStarted | None, num_ranks: int) -> str:
    command = shlex.join(redacted(started.command)) if started else ""
    return (
        "let torchrun start all ranks: "
        f"torchrun --nproc-per-node {num_ranks} -m distdiag.check {command or 'train.py'}"
    )
