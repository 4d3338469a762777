"""HNG018: a node of the job is gone, and the other ranks cannot go on without its ranks."""

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.failures import first_end
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import (
    at,
    blocking_call,
    call_location,
    call_phrase,
    whereabouts,
)
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.rank_states import JobView, RankState

WAITS_IN_VAIN_S: Final = 30.0
"""As long as a job must stand still at least to count as hung."""


class LostNode(Check[JobView]):
    """A node of the job is gone, and the other ranks cannot go on without its ranks.

    ## What you see
    The other ranks wait, or report lost connections and timeouts. The ranks of this node vanished
    together with the process that watches them, so the node or its network is gone.

    ## Example
        # wrong: the loss of one node ends the job
        torchrun --nnodes 4 train.py

        # right: the job starts again on what is left, from its last checkpoint
        torchrun --nnodes 3:4 --max-restarts 3 train.py --resume latest

    ## How to fix
    Check the node: does it answer (`ping`), what does its kernel log say, what does the scheduler
    report (a reboot, a pre-emption, a failed network)? Start the job without this node if it fails
    again.

    Changes: The job keeps its nodes; nothing in the program changes.

    Leaves: Whatever the ranks of this node did after they were last heard of.

    ## When it is not a defect
    The ranks of the node continued after that, as their own records on that node show.

    To silence it, set `ignore = ["HNG018"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/elastic/run.html
    """

    code = "HNG018"
    name = "lost-node"
    severity = Severity.ERROR

    def check(self, view: JobView) -> Iterator[Finding]:
        """Name each lost node, once others have failed or wait for it in vain."""
        states = view.states
        lost = [s for s in states.values() if s.lost is not None and not s.left_ns]
        if not lost or not _is_the_cause(lost, states):
            return
        by_host: dict[str, list[RankState]] = {}
        for state in lost:
            by_host.setdefault(state.lost.hostname if state.lost else "", []).append(state)
        others = [state for state in states.values() if state.lost is None]
        for host, gone in by_host.items():
            yield self._finding(host, gone, others)

    def _finding(self, host: str, gone: list[RankState], others: list[RankState]) -> Finding:
        ranks = RankSet(state.rank for state in gone)
        silent_s = max(state.lost.silent_s for state in gone if state.lost is not None)
        return self.finding(
            f"node {host} with {ranks.phrase()} was lost: nothing was heard of it for "
            f"{silent_s:.0f} s, and its ranks had not ended",
            ranks=ranks,
            step=min(state.step for state in gone),
            subjects=(host,),
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=(
                *(
                    Evidence(
                        ranks=RankSet([state.rank]),
                        summary=f"was last heard of{_last(state)}, in step {state.step}",
                        location=call_location(state.last_call) if state.last_call else None,
                        values={"host": host},
                    )
                    for state in gone
                ),
                *(
                    Evidence(ranks=RankSet([state.rank]), summary=whereabouts(state))
                    for state in others
                ),
            ),
        )


def _is_the_cause(lost: list[RankState], states: Mapping[int, RankState]) -> bool:
    """Say whether others failed since, for no reason of their own, or wait in vain."""
    others = [state for state in states.values() if state.lost is None]
    since_ns = min(state.lost.time_ns for state in lost if state.lost is not None)
    end = first_end(states)
    if end is not None and not _may_come_of_it(states[min(end.ranks)], since_ns):
        return False
    gone = {state.rank for state in lost}
    return any(state.has_failed or _waits_for(state, gone) for state in others)


def _may_come_of_it(state: RankState, since_ns: int) -> bool:
    """Say whether a rank raised since then, inside a library: a user's line has its own reasons."""
    frames = state.raised.frames if state.raised is not None else ()
    return bool(frames) and not frames[0].user and state.left_ns >= since_ns


def _waits_for(state: RankState, gone: set[int]) -> bool:
    call = blocking_call(state)
    is_long = state.idle_s >= WAITS_IN_VAIN_S
    return call is not None and is_long and not gone.isdisjoint(call.group.ranks)


def _last(state: RankState) -> str:
    call = state.last_call
    return f" in {call_phrase(call)}{at(call_location(call))}" if call is not None else ""
