"""COL010: an asynchronous collective is never waited for."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.collectives import Collective, CollectiveState
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, call_location, call_phrase
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.rank_states import WorkView


class UnwaitedWork(Check[WorkView]):
    """An asynchronous collective is never waited for.

    ## What you see
    The code reads values at random from before or after the call, and nobody sees an error of the
    call. The tensor holds the result only after `wait()` on the Work that the call returns.

    ## Example
        # wrong: the sum may not be there yet
        dist.all_reduce(loss, async_op=True)
        print(loss.item())

        # right
        work = dist.all_reduce(loss, async_op=True)
        work.wait()
        print(loss.item())

    ## How to fix
    Keep the Work and wait for it before the result is used:
    `work = dist.all_reduce(tensor, async_op=True)`, then `work.wait()`. Or drop `async_op=True`.

    Changes: The host, or its stream, waits there for the call to end.

    Leaves: Values that were read too early in the steps before.

    ## When it is not a defect
    A `wait()` on this Work, or a synchronisation of the device, comes before the use of the tensor.

    Barriers, sends and receives are a note.

    Barriers, sends and receives are a note. To silence it, set `ignore = ["COL010"]` in
    `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#synchronous-and-asynchronous-collective-operations
    """

    code = "COL010"
    name = "unwaited-work"
    severity = Severity.WARNING

    def check(self, view: WorkView) -> Iterator[Finding]:
        """Judge a Work that was released."""
        event, recent = view.event, view.recent
        if not isinstance(event, CollectiveState) or event.state != "dropped":
            return
        call = next((call for call in recent if call.seq == event.call), None)
        if call is None or not call.is_async or call.api is None or not _is_users_own(call):
            return
        location = call_location(call)
        has_result = call.signature.peer is None and "barrier" not in call.signature.op
        ranks = RankSet([event.rank])
        yield self.finding(
            f"{ranks.phrase()} never waited for {call_phrase(call)}, issued with "
            f"async_op=True{at(location)}",
            ranks=ranks,
            step=call.step,
            location=location,
            grade=Grade.LIKELY if has_result else Grade.NOTE,
            confidence=0.8 if has_result else 0.3,
            evidence="dropped its Work without wait()",
        )


def _is_users_own(call: Collective) -> bool:
    """Say whether the frame that called torch is the user's, and no framework's."""
    frames = call.site.frames
    outside = (f for f in frames if "/torch/" not in f.file and "/distdiag/" not in f.file)
    caller = next(outside, None)
    return caller is not None and caller.user
