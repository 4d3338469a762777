"""CKP001: sharded state is saved or gathered on some ranks only."""

from __future__ import annotations

from typing import Final

from distdiag.findings.finding import Severity
from distdiag.lint.guarded import GuardedSite, GuardRule
from distdiag.lint.operations import Family

# Replicated models get away with these: only what each rank has of its own is lost.
_TOLERATED: Final = frozenset({"get_state_dict", "save_state"})


class RankGuardedCheckpoint(GuardRule):
    """Sharded state is saved, loaded or gathered on some ranks only.

    ## What it detects
    `torch.distributed.checkpoint.save` and its like, `get_model_state_dict`, accelerate's
    `save_state` and `get_state_dict`, `save_checkpoint` of a DeepSpeed engine and `fabric.save`,
    themselves or through the given files, under a condition that holds on some ranks only.

    ## Why it matters
    Every rank holds a part of the state, and bringing it together is a collective. The rank that
    saves alone waits for ever, or writes a checkpoint that has its own part only. accelerate's
    `save_state` of a replicated model works, but keeps the random state of one rank: a warning.

    ## Example
    `if accelerator.is_main_process: accelerator.save_state(folder)`

    ## How to fix
    Call it on all ranks. These functions let one rank write by themselves where that is needed.

    ## References
    - `torch.distributed.checkpoint.save`
    - `accelerate.Accelerator.save_state`, `deepspeed.DeepSpeedEngine.save_checkpoint`
    """

    code = "CKP001"
    name = "rank-guarded-checkpoint"
    severity = Severity.ERROR
    family = Family.CHECKPOINT
    problem = "needs every rank"

    def severity_of(self, found: GuardedSite) -> Severity:
        """Return warning, and no error, for what loses no more than what each rank has alone."""
        severity = super().severity_of(found)
        is_tolerated = found.effect.operation.kind in _TOLERATED
        return Severity.WARNING if is_tolerated and severity is Severity.ERROR else severity
