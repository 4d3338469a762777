"""CKP011: tensors are changed by one thread while another one saves them."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.checkpoints import ChangedWhileSaved as Event
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Severity


class ChangedWhileSaved(Check[Event]):
    """Tensors are changed by one thread while another one saves them.

    ## What you see
    A checkpoint holds some values from before a step and others from after it, and a resumed
    training jumps. A background thread writes the tensors of the model or the optimizer
    themselves, while the training goes on and changes them.

    ## Example
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        # wrong: both refer to the tensors that the next step changes
        pool.submit(torch.save, state, path)
        # right
        pool.submit(torch.save, copy.deepcopy(state), path)

    ## How to fix
    Copy what is saved before the thread starts: `copy.deepcopy(state)`, or
    `tensor.detach().clone()` of each tensor. `.cpu()` alone copies nothing that is on the CPU
    already.

    Changes: Memory for one copy is in use until it is written.

    Leaves: Checkpoints that were written before.

    ## When it is not a defect
    The values may be of different steps, as in weights that are published to be looked at.

    To silence it, set `ignore = ["CKP011"]` in `distdiag.toml`.

    ## References
    - https://github.com/Lightning-AI/pytorch-lightning/pull/21079
    - https://github.com/pytorch/pytorch/issues/144657
    """

    code = "CKP011"
    name = "changed-while-saved"
    severity = Severity.WARNING

    def check(self, view: Event) -> Iterator[Finding]:
        """Name what was changed and which thread saved it."""
        ranks = RankSet([view.rank])
        more = view.num_changed - 1
        names = view.names[0] + (f" and {more} more tensors" if more else "")
        is_are = "were" if more else "was"
        yield self.finding(
            f"{names} {is_are} changed while thread {view.thread} of {ranks.phrase()} saved "
            f"{'them' if more else 'it'}",
            ranks=ranks,
            step=view.step,
            location=user_location(view.site.frames),
            subjects=view.names,
            confidence=0.95,
            evidence=f"{view.num_changed} of {view.num_saved} tensors have another version at the "
            "end of the save than at its beginning",
        )
