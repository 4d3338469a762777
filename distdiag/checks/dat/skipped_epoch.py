"""DAT010: the state of a loader belongs to an epoch before, so that this one has no batch."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.data import LoaderResumed
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import ResumedLoaderView


class SkippedEpoch(Check[ResumedLoaderView]):
    """A resumed loader has no batch for an epoch, because its state is from the end of another.

    ## What you see
    The resumed training runs through one epoch without a step and ends early. The state of the
    loader was saved after the last batch of an epoch, and the loader takes this finished epoch for
    the current one.

    ## Example
        # wrong: the state says that all batches of epoch 1 were handed out
        loader.load_state_dict(state)
        for epoch in range(2, num_epochs):
            sampler.set_epoch(epoch)
            for batch in loader: ...
        # right: a new epoch begins with a fresh loader
        if step % len(loader):
            loader.load_state_dict(state)

    ## How to fix
    After the last batch of an epoch, do not save `loader.state_dict()`. Or, if the saved epoch is
    finished, do not call `loader.load_state_dict(...)` when you resume.

    Changes: The resumed epoch is trained on.

    Leaves: Runs that were already resumed: they lack an epoch.

    ## When it is not a defect
    The number of the epoch was changed on purpose, and there is nothing left to train.

    If so, add `ignore = ["DAT010"]` to `distdiag.toml`. Where the state was saved by another
    process its epoch is not known, and it is only a note.

    ## References
    - https://github.com/verl-project/verl/issues/7401
    - https://meta-pytorch.org/data/main/torchdata.stateful_dataloader.html
    """

    code = "DAT010"
    name = "skipped-epoch"
    severity = Severity.WARNING

    def check(self, view: ResumedLoaderView) -> Iterator[Finding]:
        """Name the epoch that had no batch."""
        skipped = {r: one for r, one in view.by_rank.items() if _is_skipped(one)}
        if not skipped:
            return
        ranks, first = RankSet(skipped), skipped[min(skipped)]
        epoch = "a pass" if first.epoch is None else f"epoch {first.epoch}"
        saved = ", ".join(map(str, first.saved_epochs))
        since = (
            f"its state is from the end of epoch {saved}"
            if saved
            else ("its state was saved after the last batch of an epoch")
        )
        location = user_location(first.site.frames)
        evidence = [
            Evidence(ranks=ranks, summary="the loader returned no batch", location=location)
        ]
        if first.saved_at is not None:
            where = user_location(first.saved_at.frames)
            text = f"the state was saved here, in epoch {saved}" if saved else "saved here"
            evidence.append(Evidence(ranks=ranks, summary=text, location=where))
        yield self.finding(
            f"{first.loader} of {first.dataset} has no batch for {epoch}: {since}",
            ranks=ranks,
            step=first.step,
            location=location,
            subjects=(first.loader,),
            grade=Grade.PROVEN if saved else Grade.NOTE,
            evidence=tuple(evidence),
        )


def _is_skipped(one: LoaderResumed) -> bool:
    # In the epoch of the state an empty pass is right: it ends that epoch.
    return one.num_batches == 0 and (one.epoch is None or one.epoch not in one.saved_epochs)
