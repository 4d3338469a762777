"""ENV005: the wall clocks of nodes are apart."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.surroundings import NodeClocksView

LEAST_SKEW_S: Final = 1.0
"""NTP keeps clocks within milliseconds; the times of files and of most logs have seconds."""


class ClockSkew(Check[NodeClocksView]):
    """The wall clocks of nodes are apart.

    ## What you see
    If you merge the logs of the nodes by time, consequences appear before their causes; the newest
    file by its time is not the one that was written last, and tokens of storage services expire too
    early. The wall clocks of the nodes differ.

    ## Example
        node-0$ date +%s; ssh node-1 date +%s
        1767225600
        1767225642    # wrong: 42 s ahead

    ## How to fix
    Run chrony or NTP on all nodes (`chronyc tracking` shows the offset of a node).

    Changes: The times that the nodes write from then on.

    Leaves: The order of events in this report, which uses measured offsets and not wall clocks.

    ## When it is not a defect
    Nothing compares times of different nodes.

    If so, add `ignore = ["ENV005"]` to `distdiag.toml`.

    ## References
    - https://chrony-project.org/documentation.html
    """

    code = "ENV005"
    name = "clock-skew"
    severity = Severity.INFO

    def check(self, view: NodeClocksView) -> Iterator[Finding]:
        """Compare the clocks of all nodes with that of the node that compares."""
        clocks = sorted(view.by_rank.values(), key=lambda clock: clock.ahead_ns)
        last, first = clocks[0], clocks[-1]
        apart_s = (first.ahead_ns - last.ahead_ns) / 1e9
        doubt_s = (first.error_ns + last.error_ns) / 1e9
        if apart_s - doubt_s < LEAST_SKEW_S:
            return
        yield self.finding(
            f"the wall clocks of {len(clocks)} nodes differ by {apart_s:.1f} s: the clock of "
            f"{first.hostname} is ahead of the clock of {last.hostname}",
            ranks=RankSet([last.rank, first.rank]),
            subjects=(first.hostname, last.hostname),
            grade=Grade.NOTE,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([clock.rank]),
                    summary=f"{clock.hostname} is {(clock.ahead_ns - last.ahead_ns) / 1e9:.3f} s "
                    f"ahead of {last.hostname}, known within {clock.error_ns / 1e9:.3f} s",
                )
                for clock in clocks
            ),
        )
