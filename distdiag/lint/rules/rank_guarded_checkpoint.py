"""CKP001: sharded state is saved or gathered on some ranks only."""

from typing import Final

from distdiag.findings.finding import Severity
from distdiag.lint.guarded import GuardedSite, GuardRule
from distdiag.lint.operations import Family

# Replicated models get away with these: only what each rank has of its own is lost.
_TOLERATED: Final = frozenset({"get_state_dict", "save_state"})


class RankGuardedCheckpoint(GuardRule):
    """Sharded state is saved, loaded or gathered on some ranks only.

    ## What you see
    The rank that saves alone waits for ever, or writes a checkpoint that has only its own part.
    Every rank holds a part of the state, and bringing the parts together is a collective.

    ## Example
        # wrong
        if accelerator.is_main_process:
            accelerator.save_state(folder)
        # right: accelerate lets one rank write where that is needed
        accelerator.save_state(folder)

    ## How to fix
    Call it on all ranks. These functions let one rank write by themselves where that is needed.

    ## When it is not a defect
    Each rank holds the whole state, and what only one rank saves is enough to go on with.

    accelerate's `save_state` of a replicated model is a warning: it works, but keeps the random
    state of one rank. To silence a line, end it with `# distdiag: ignore[CKP001]`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    - https://huggingface.co/docs/accelerate/package_reference/accelerator
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
