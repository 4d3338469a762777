"""BAR006: only one rank of the job writes a file that every node needs on its local disk."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.findings.source import rank_guards
from distdiag.views.files import MissingFile


class GuardByGlobalRank(Check[MissingFile]):
    """Only one rank of the job writes a file that every node needs on its local disk.

    ## What you see
    The program works on one node, but with more nodes a rank fails because a file is missing on its
    node. Only one rank of the whole job writes the file, to storage that is local to its node, so a
    barrier does not help.

    ## Example
        # wrong: only the first node gets the index
        if rank == 0:
            build_index("/local/cache")
        dist.barrier()

        # right: one rank of each node builds it
        if int(os.environ["LOCAL_RANK"]) == 0:
            build_index("/local/cache")
        dist.barrier()

    ## How to fix
    Use the local rank in the condition: `if int(os.environ["LOCAL_RANK"]) == 0:`. Or write to
    storage that all nodes share.

    Changes: Every node prepares the file once.

    Leaves: The other ranks of a node still need a `dist.barrier()` after the write.

    ## When it is not a defect
    The records show that a rank on the node of the failing rank has written this file.

    To silence it, set `ignore = ["BAR006"]` in `distdiag.toml`.

    ## References
    - https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5107
    - https://github.com/huggingface/trl/issues/7223
    - https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """

    code = "BAR006"
    name = "guard-by-global-rank"
    severity = Severity.ERROR

    def check(self, missing: MissingFile) -> Iterator[Finding]:
        """Judge a rank that ended because a file was not there."""
        guards = {
            rank: guard
            for rank, access in missing.namesakes.items()
            if missing.written in ("", access.written)
            for frame in access.site.user_frames
            for guard in rank_guards(frame)
        }
        if not guards:
            return
        writer = min(guards)
        made, guard = missing.namesakes[writer], guards[writer]
        location = user_location(missing.raised.frames)
        yield self.finding(
            f"rank {missing.rank} needs {missing.path}{at(location)}, and no rank of its node has "
            f"written it: `{guard.text}` at {guard.location} lets only {RankSet(guards).phrase()} "
            f"write {made.written}",
            ranks=RankSet(guards),
            step=made.step,
            location=guard.location,
            subjects=(missing.path, made.path),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=RankSet([missing.rank]),
                    summary=f"raised {missing.raised.type}: {missing.raised.message}"[:300],
                    location=location,
                ),
                Evidence(
                    ranks=RankSet(guards),
                    summary=f"wrote {made.path}",
                    location=user_location(made.site.frames),
                    values={"guard": guard.text},
                ),
            ),
        )
