"""BAR008: ranks test whether a file exists, see different answers, and part for it."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import is_reliable
from distdiag.checks.shared.explanations import state_of
from distdiag.events.collectives import Collective
from distdiag.events.files import FileAccess
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import call_location, call_phrase, user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import Alignment, FileTestView
from distdiag.views.rank_states import RankState


class DivergentExistenceTest(Check[FileTestView]):
    """Ranks test whether a file exists, see different answers, and part for it.

    ## What it detects
    Tests of one path at one place of the program that nothing orders, which found the file on some
    ranks and not on others, after which these ranks went on to different collectives.

    ## Why it matters
    Some ranks wait in a collective that the others never reach, or exchange unrelated data.

    ## Example
    `if not os.path.exists(cache): build(); dist.barrier()` on every rank, while one is faster.

    ## How to fix
    Let one rank test and broadcast the answer, and let all ranks call the same collectives.

    ## References
    - `torch.distributed.broadcast_object_list`
    """

    code = "BAR008"
    name = "divergent-existence-test"
    severity = Severity.ERROR

    why = "Whether a file is there yet depends on time, so ranks may get different answers."
    fix = "Test on one rank, broadcast the answer, and let every rank branch on that."
    fix_changes = "All ranks take the same branch, even where a rank could see more by itself."
    fix_leaves = "Storage that is local to nodes, where one answer does not fit all."
    disproof = "The ranks made the same collectives after the test."

    def check(self, alignment: FileTestView) -> Iterator[Finding]:
        """Judge a test that all ranks made."""
        if alignment.kind != "test":
            return
        camps = {
            found: RankSet(r for r, test in alignment.by_rank.items() if test.found is found)
            for found in (True, False)
        }
        if not (camps[True] and camps[False]):
            return
        if len({_moment(alignment, rank) for rank in alignment.by_rank}) > 1:
            return  # something orders the tests: one rank tests first and the others wait for it
        following = {rank: _next_call(alignment, rank) for rank in alignment.by_rank}
        if not _is_parted(following, camps[True], camps[False]):
            return
        test = alignment.any_event
        location = user_location(test.site.frames)
        odd = min(camps.values(), key=lambda ranks: (len(ranks), min(ranks)))
        yield self.finding(
            f"{test.written} exists for {camps[True].phrase()} and not for "
            f"{camps[False].phrase()} at {location}, and they go on to different collectives",
            ranks=odd if len(camps[True]) != len(camps[False]) else alignment.present_ranks,
            step=test.step,
            location=location,
            subjects=tuple(dict.fromkeys((test.path, test.written))),
            grade=Grade.LIKELY if is_reliable(alignment) else Grade.NOTE,
            confidence=0.85,
            evidence=tuple(
                _evidence(ranks, is_found, following[min(ranks)])
                for is_found, ranks in camps.items()
            ),
        )


def _moment(alignment: Alignment[FileAccess], rank: int) -> tuple[str, int] | None:
    """Return which call a rank made last before it tested."""
    test = alignment.by_rank[rank]
    calls = [call for call in state_of(alignment, rank).recent if call.seq < test.seq]
    return (calls[-1].group.name, calls[-1].collective_seq_id) if calls else None


def _next_call(alignment: Alignment[FileAccess], rank: int) -> Collective | None:
    state: RankState = state_of(alignment, rank)
    test = alignment.by_rank[rank]
    return next((call for call in state.recent if call.seq > test.seq), None)


def _is_parted(following: dict[int, Collective | None], one: RankSet, other: RankSet) -> bool:
    here, there = following[min(one)], following[min(other)]
    if here is None or there is None:
        return here is not there
    return (here.signature.op, here.group.name) != (there.signature.op, there.group.name)


def _evidence(ranks: RankSet, is_found: bool, call: Collective | None) -> Evidence:
    answer = "found it" if is_found else "did not find it"
    if call is None:
        return Evidence(ranks=ranks, summary=f"{answer}, and made no collective since")
    return Evidence(
        ranks=ranks,
        summary=f"{answer}, then went on to {call_phrase(call)}",
        location=call_location(call),
    )
