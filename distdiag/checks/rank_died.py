"""HNG002: the process of a rank is gone, and it had neither finished nor raised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distdiag.alignment import Alignment, Fate, RankState
from distdiag.checks.base import Check
from distdiag.event import Collective, Exited
from distdiag.finding import Evidence, Finding, Grade, Severity
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import at, call_location, call_phrase, exit_phrase, whereabouts
from distdiag.reasoning.failures import contradicting_rank, first_died, first_raised


class RankDied(Check):
    """The process of a rank is gone, and it had neither finished nor raised.

    ## What it detects
    The first process that vanished without a Python exception: killed by a signal (the kernel's
    out-of-memory killer, a scheduler), or aborted in C++. Ranks that the launcher stops afterwards
    are not accused, and neither is a rank whose backend aborted over contradictory collectives, or
    one that ended after the job had been found to hang.

    ## Why it matters
    Nothing is printed by a killed process, and what the others print is about lost connections.

    ## Example
    The host runs out of memory while rank 3 loads its checkpoint: SIGKILL.

    ## How to fix
    Look for the reason outside of Python: the kernel log (out of memory), the scheduler's log, the
    last lines that the rank wrote, a core file.

    ## References
    - `signal(7)`, `dmesg(1)`
    """

    code = "HNG002"
    name = "rank-died"
    severity = Severity.ERROR
    needs = (Exited, Collective)

    why = (
        "A process that is killed or aborts says nothing; its peers only see the connection close."
    )
    fix = (
        "Look in the kernel log for the out-of-memory killer, in the scheduler's log for a limit "
        "or a pre-emption, and above the end of this rank's output for a C++ error."
    )
    fix_changes = "Less memory on this rank, if that was it."
    fix_leaves = "Messages of the other ranks about lost connections are consequences."
    disproof = "The rank wrote that it finished, or another rank had left before it."

    def check_missing(self, alignment: Alignment[Collective]) -> Iterator[Finding]:
        """Name the death at once when others wait for the rank."""
        fates = {alignment.states[r].fate for r in alignment.missing_ranks if r in alignment.states}
        if Fate.DIED in fates:
            yield from self._judge(alignment.states)

    def check_ranks(self, states: Mapping[int, RankState]) -> Iterator[Finding]:
        """Name the first rank that died, unless an exception came before."""
        yield from self._judge(states)

    def _judge(self, states: Mapping[int, RankState]) -> Iterator[Finding]:
        died = first_died(states)
        raised = first_raised(states)
        if not died or any(states[r].left_ns <= states[min(died)].left_ns for r in raised):
            return
        state = states[min(died)]
        others = RankSet(states.keys() - died)
        is_outside = not others and len(died) > 1
        peer = contradicting_rank(state, states)
        ending = " with all others at once, so somebody ended the job" if is_outside else ""
        if peer is not None:
            ending = f": its last collective contradicted that of rank {peer}"
        is_consequence = is_outside or peer is not None or state.left_hang
        call = state.last_call
        last = f"; it had last called {call_phrase(call)}" if call is not None else ""
        location = call_location(call) if call is not None else None
        yield self.finding(
            f"{died.phrase()} died{exit_phrase(state.exit_status)}{ending}{last}{at(location)}",
            ranks=died,
            step=state.step,
            location=location,
            grade=Grade.NOTE if is_consequence else Grade.PROVEN,
            confidence=0.95,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"{whereabouts(each)}, in step {each.step}",
                    location=call_location(each.last_call) if each.last_call else None,
                )
                for rank, each in states.items()
            ),
        )
