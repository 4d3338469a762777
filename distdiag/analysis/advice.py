"""What would have helped to find more in what a job left: said only where something was missing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from distdiag.analysis.evidence import Evidence
from distdiag.events.stacks import FaultLogged
from distdiag.findings.finding import Finding, Grade, Outcome, Severity
from distdiag.findings.known_faults import known_faults

RECORDER: Final = (
    "set TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1, so that each rank "
    "writes down its last collectives when one times out (TORCH_NCCL_DEBUG_INFO_TEMP_FILE says "
    "where)"
)
"""torch 2.13 calls the first one TORCH_FR_BUFFER_SIZE, and reads either."""
STACKS: Final = "while it hangs, run `distdiag dump --out dumps` on each node, twice"
LOGS: Final = "keep the output of every rank: torchrun --log-dir logs --tee 3"
AGENT: Final = "run it as `torchrun … -m distdiag.check train.py`, which records all of this"
NCCL: Final = "set NCCL_DEBUG=WARN, so that NCCL says what failed"


def what_to_collect(
    evidence: Evidence, findings: Sequence[Finding], outcome: Outcome
) -> tuple[str, ...]:
    """Return what to collect next time, one sentence each; nothing where a verdict stands.

    A verdict stands where something is proven, or where the job did not fail at all. Which parts
    are missing depends on what was given.
    """
    if outcome is Outcome.FINISHED or any(_is_verdict(finding) for finding in findings):
        return ()
    has_failed = outcome is not Outcome.RUNNING or any(_is_alarm(f) for f in findings)
    if not has_failed and evidence.folders:
        return ()
    kinds = {kind for file in evidence.files for kind in file.kinds}
    is_named = any(_is_alarm(finding) and finding.ranks for finding in findings)
    may_hang = outcome is not Outcome.FAILED or not is_named
    return tuple(_missing(evidence, kinds, may_hang=may_hang))


def _is_alarm(finding: Finding) -> bool:
    return finding.severity is not Severity.INFO


def _is_verdict(finding: Finding) -> bool:
    """Say whether a finding proves or explains what went wrong; one about the tool has no step."""
    is_of_run = finding.step is not None or finding.location is not None
    is_explained = any("known_fault" in evidence.values for evidence in finding.evidence)
    is_sure = finding.grade is Grade.PROVEN or (is_explained and bool(finding.ranks))
    return _is_alarm(finding) and is_sure and is_of_run


def _missing(evidence: Evidence, kinds: Collection[str], *, may_hang: bool) -> Iterator[str]:
    if "run directory" in kinds:
        return
    if "log" not in kinds or evidence.members != evidence.observed:
        yield LOGS
    # Where an exception of a rank ended the job, neither says more than its traceback.
    if "flight recorder" not in kinds and may_hang:
        yield RECORDER
    if "stacks" not in kinds and may_hang:
        yield STACKS
    if _has_general_error(evidence):
        yield NCCL
    yield AGENT


def _has_general_error(evidence: Evidence) -> bool:
    general = {row.id for row in known_faults() if row.role == "general"}
    events = (event for events in evidence.events.values() for event in events)
    return any(isinstance(event, FaultLogged) and event.fault in general for event in events)
