"""HNG003: the job makes no progress, and no collective explains it."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.hng.stuck_rank import outside_evidence, where_all_are
from distdiag.checks.shared.activities import common_activity, will_come
from distdiag.checks.shared.holders import holder_of
from distdiag.checks.shared.stuck import odd_ranks
from distdiag.findings.descriptions import (
    blocking_call,
    each_whereabouts,
    frames_of,
    idle_phrase,
    user_location,
)
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.rank_states import JobView, RankState, RankStatus


class NoProgress(Check[JobView]):
    """The job makes no progress, and no collective explains it.

    ## What you see
    The whole job stands still: no rank has issued a call, drawn a batch or run a backward pass for
    the hang threshold. No timeout of a process group covers this wait, so the job uses its GPUs
    until somebody kills it.

    ## Example
        # wrong: every rank polls for something that never happens
        while not os.path.exists("go"):
            time.sleep(1)

        # right: the wait has an end
        deadline = time.monotonic() + 60
        while not os.path.exists("go"):
            if time.monotonic() > deadline:
                raise TimeoutError("nobody wrote the file go")
            time.sleep(1)

    ## How to fix
    Look at the lines in the evidence and free what they wait for (a lock, a file, a server). If the
    job is only slow, raise the threshold with `--hang-timeout`.

    Changes: Nothing else, if what was waited for comes.

    Leaves: The job may still be slow where it was stuck.

    ## When it is not a defect
    The job continues by itself: it was slow, not stuck. Then raise `--hang-timeout`.

    To silence it, set `ignore = ["HNG003"]` in `distdiag.toml`.

    ## References
    - https://docs.python.org/3/library/faulthandler.html
    - https://github.com/benfred/py-spy
    """

    code = "HNG003"
    name = "no-progress"
    severity = Severity.ERROR

    def check(self, view: JobView) -> Iterator[Finding]:
        """Report ranks that stand still where no other check knows what they do."""
        states = view.states
        odd = odd_ranks(states)
        if not odd or common_activity(states[rank] for rank in odd) is not None:
            return
        if all(_is_in_call(state) for state in map(states.get, odd) if state is not None):
            return  # HNG016 reports that
        running = [state for state in states.values() if state.status is RankStatus.RUNNING]
        if all(s.is_idle_assumed and not _is_in_call(s) for s in running):
            return  # that the job stood still is only assumed
        is_late = all(will_come(states[rank], states) for rank in odd)
        holder = holder_of(states[min(odd)], states)
        yield self.finding(
            f"nothing has moved{idle_phrase(min(running, key=lambda s: s.idle_s))}: "
            f"{each_whereabouts([states[rank] for rank in odd])}"
            + (f"; {holder.text}" if holder is not None else ""),
            ranks=odd,
            step=states[min(odd)].step,
            location=user_location(frames_of(states[min(odd)])),
            grade=Grade.NOTE if is_late else Grade.LIKELY,
            confidence=0.3 if is_late else 0.8,
            evidence=(holder.evidence if holder is not None else ())
            + where_all_are(states)
            + outside_evidence(states, odd),
            fix=holder.fix if holder is not None else self.fix,
        )


def _is_in_call(state: RankState) -> bool:
    return blocking_call(state) is not None or state.is_in_unrecorded_call
