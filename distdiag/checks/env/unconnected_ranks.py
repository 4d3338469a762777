"""ENV001: ranks were launched together, and each trains a model of its own."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.lifecycle import SteppedAlone
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import LoneStepsView


class UnconnectedRanks(Check[LoneStepsView]):
    """Ranks were launched together, and each trains a model of its own.

    ## What you see
    N ranks train N separate models, often on the same data, and write the same files; the job is no
    faster than one rank. A launcher only starts processes: without a process group nothing connects
    them, and no gradient is averaged.

    ## Example
        # wrong: torchrun --nproc-per-node 2 train.py
        model = Model()
        train(model)

        # right
        dist.init_process_group()
        model = DistributedDataParallel(Model())
        train(model)

    ## How to fix
    Call `dist.init_process_group()` before the model is built, and wrap the model
    (`DistributedDataParallel(model)`). With accelerate on CPUs, pass `Accelerator(cpu=True)` or
    launch with `accelerate launch --multi_cpu`. If the ranks are intended to train independently,
    pass `--ignore ENV001`.

    Changes: The gradients are averaged over the ranks, and the global batch is N times larger.

    Leaves: Files that all ranks write: let only one rank write.

    ## When it is not a defect
    The ranks are independent runs, as in a sweep, or exchange their gradients in a way that is
    neither torch.distributed nor RPC (Horovod, mpi4py, Ray, torch_xla).

    To silence it, set `ignore = ["ENV001"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
    - https://huggingface.co/docs/accelerate/package_reference/cli
    """

    code = "ENV001"
    name = "unconnected-ranks"
    severity = Severity.WARNING

    def check(self, alignment: LoneStepsView) -> Iterator[Finding]:
        """Name the ranks that train alone, and where they take their first step."""
        alone = alignment.by_rank
        if len(alone) < 2:
            return
        ranks, first = RankSet(alone), alone[min(alone)]
        others = sorted({name for event in alone.values() for name in event.others})
        is_all = ranks == alignment.expected_ranks
        who = f"all {len(ranks)} ranks train" if is_all else f"{ranks.phrase()} train"
        so_far = (
            f"; {', '.join(others)} may connect them, which distdiag does not observe"
            if others
            else ""
        )
        yield self.finding(
            f"{who} alone: WORLD_SIZE is {first.num_launched} and {_why(first)} at the first "
            f"optimizer step{so_far}",
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            grade=Grade.NOTE if others else Grade.LIKELY,
            confidence=0.5 if others else 0.9,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"{_why(event)} at its first optimizer step",
                    location=user_location(event.site.frames),
                    values={"WORLD_SIZE": event.num_launched},
                )
                for rank, event in alone.items()
            ),
        )


def _why(event: SteppedAlone) -> str:
    if event.library:
        return f"{event.library} has set itself up for one process"
    return "no process group exists"
