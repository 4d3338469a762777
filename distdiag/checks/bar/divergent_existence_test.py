"""BAR008: ranks test whether a file exists, get different answers, and take different branches."""

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


class DivergentExistenceTest(Check[FileTestView]):
    """Ranks test whether a file exists, get different answers, and take different branches.

    ## What you see
    Some ranks wait in a collective that the other ranks never reach, or exchange data that does not
    belong together. Each rank tests by itself whether a file exists, and the answer depends on
    which rank is faster.

    ## Example
        # wrong: a slow rank finds the file that a fast one has built
        if not os.path.exists(cache):
            build(cache)
            dist.barrier()

        # right: one rank tests, and all follow its answer
        found = [os.path.exists(cache)]
        dist.broadcast_object_list(found, src=0)
        if not found[0]:
            build(cache)
            dist.barrier()

    ## How to fix
    Test on one rank and broadcast the answer, then let every rank branch on that answer:
    `found = [os.path.exists(path)]`, `dist.broadcast_object_list(found, src=0)`,
    `if found[0]: ...`.

    Changes: All ranks take the same branch, even if one rank sees a file that rank 0 does not see.

    Leaves: Storage that is local to nodes, where one answer is not right for all ranks.

    ## When it is not a defect
    The ranks called the same collectives after the test.

    To silence it, set `ignore = ["BAR008"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.broadcast_object_list
    """

    code = "BAR008"
    name = "divergent-existence-test"
    severity = Severity.ERROR

    def check(self, alignment: FileTestView) -> Iterator[Finding]:
        """Judge a test that all ranks made."""
        groups = {
            found: RankSet(r for r, test in alignment.by_rank.items() if test.found is found)
            for found in (True, False)
        }
        if not (groups[True] and groups[False]):
            return
        if len({_moment(alignment, rank) for rank in alignment.by_rank}) > 1:
            return  # something orders the tests: one rank tests first and the others wait for it
        following = {rank: _next_call(alignment, rank) for rank in alignment.by_rank}
        if not _differ(following, groups[True], groups[False]):
            return
        test = alignment.any_event
        location = user_location(test.site.frames)
        odd = min(groups.values(), key=lambda ranks: (len(ranks), min(ranks)))
        yield self.finding(
            f"{test.written} exists for {groups[True].phrase()} and not for "
            f"{groups[False].phrase()} at {location}, and they go on to different collectives",
            ranks=odd if len(groups[True]) != len(groups[False]) else alignment.present_ranks,
            step=test.step,
            location=location,
            subjects=tuple(dict.fromkeys((test.path, test.written))),
            grade=Grade.LIKELY if is_reliable(alignment) else Grade.NOTE,
            confidence=0.85,
            evidence=tuple(
                _evidence(ranks, is_found, following[min(ranks)])
                for is_found, ranks in groups.items()
            ),
        )


def _moment(alignment: Alignment[FileAccess], rank: int) -> tuple[str, int] | None:
    """Return which call a rank made last before it tested."""
    test = alignment.by_rank[rank]
    calls = [call for call in state_of(alignment, rank).recent if call.seq < test.seq]
    return (calls[-1].group.name, calls[-1].collective_seq_id) if calls else None


def _next_call(alignment: Alignment[FileAccess], rank: int) -> Collective | None:
    test = alignment.by_rank[rank]
    return next((call for call in state_of(alignment, rank).recent if call.seq > test.seq), None)


def _differ(following: dict[int, Collective | None], one: RankSet, other: RankSet) -> bool:
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
