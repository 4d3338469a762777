"""DIA003: a probe could not observe and was switched off."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.record.exception_text import LONGEST_TRACEBACK, shortened


class DisabledProbe(Check[ProbeDisabled]):
    """A probe could not observe and was switched off.

    ## What you see
    Checks that need this probe say at most a note about this rank. The probe switched itself off so
    that it does not disturb the training, which continues.

    ## Example
        # wrong: the run directory is on a disk that is full
        torchrun --nproc-per-node 4 -m distdiag.check --run-dir /full/run train.py

        # right
        torchrun --nproc-per-node 4 -m distdiag.check --run-dir /scratch/run train.py

    ## How to fix
    Remove the reason that the evidence names, for example a full disk or a missing permission. If
    the evidence shows an exception of distdiag, report the traceback.

    Changes: The checks that need this probe judge the rank again.

    Leaves: What the probe missed in this run stays unknown.

    ## When it is not a defect
    Later records of the rank come from this probe.

    To silence it, set `ignore = ["DIA003"]` in `distdiag.toml`.

    ## References
    - https://docs.python.org/3/library/errno.html
    """

    code = "DIA003"
    name = "disabled-probe"
    severity = Severity.INFO

    def check(self, event: ProbeDisabled) -> Iterator[Finding]:
        """Report the probe and the reason that the rank recorded."""
        ranks = RankSet([event.rank])
        yield self.finding(
            f"probe {event.probe} of rank {event.rank} was switched off: {event.reason}",
            ranks=ranks,
            step=event.step,
            subjects=(event.probe,),
            confidence=1.0,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=event.reason,
                    values={"traceback": shortened(event.traceback, LONGEST_TRACEBACK)}
                    if event.traceback
                    else {},
                ),
            ),
        )
