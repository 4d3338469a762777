"""DAT012: a rank needs a file of its own that no rank has written, though others wrote theirs."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.findings.source import rank_guards
from distdiag.views.files import MissingFile


class MissingPart(Check[MissingFile]):
    """A rank needs a file of its own that no rank has written, though others wrote theirs.

    ## What you see
    A rank ends because its file does not exist, although other ranks wrote files of the same kind
    with other numbers in their names. The ranks that write and the ranks that read number the parts
    differently, or only some ranks write.

    ## Example
        # wrong: written by the rank among the experts' ranks, read by the rank in the job
        torch.save(state, f"part{dist.get_rank(experts)}.pt")
        state = torch.load(f"part{dist.get_rank()}.pt")
        # right: the same number in both

    ## How to fix
    Build the name of the part in one function that both the writer and the reader call, and let
    each rank write its own part.

    Changes: Each rank finds the part that it needs.

    Leaves: Files that were written under other names.

    ## When it is not a defect
    A different run was intended to write the file.

    If so, add `ignore = ["DAT012"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """

    code = "DAT012"
    name = "missing-part"
    severity = Severity.ERROR
    covers = ("HNG001",)

    def check(self, missing: MissingFile) -> Iterator[Finding]:
        """Judge a rank that ended because a file was not there."""
        if missing.namesakes or not missing.siblings:
            return
        made = missing.siblings[min(missing.siblings)]
        guards = [g for frame in made.site.user_frames for g in rank_guards(frame)]
        where, wrote = user_location(missing.raised.frames), user_location(made.site.frames)
        only = f", since `{guards[-1].text}` lets no other rank write" if guards else ""
        yield self.finding(
            f"rank {missing.rank} needs {missing.path}{at(where)}, which no rank has written; "
            f"{RankSet(missing.siblings).phrase()} wrote {made.written}{at(wrote)}{only}",
            ranks=RankSet([missing.rank]),
            step=missing.raised.step,
            location=where,
            subjects=(missing.path, made.path),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=RankSet([missing.rank]),
                    summary=f"raised {missing.raised.type}: {missing.raised.message}"[:300],
                    location=where,
                ),
                Evidence(
                    ranks=RankSet(missing.siblings),
                    summary=f"wrote {made.path}",
                    location=wrote,
                ),
            ),
        )
