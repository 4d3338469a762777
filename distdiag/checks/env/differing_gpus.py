"""ENV004: ranks compute on different models of GPU."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.surroundings import differences
from distdiag.events.environment import FactKind
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.surroundings import SurroundingsView

_NAME: Final = "GPU"


class DifferingGpus(Check[SurroundingsView]):
    """Ranks compute on different models of GPU.

    ## What you see
    Every step takes as long as on the slowest GPU, and the smallest memory limits the batch size.
    Different GPU models use different kernels, so equal inputs give results that differ in the last
    digits, and some ranks may lack a kernel or a dtype.

    ## Example
        node-0$ nvidia-smi -L    # GPU 0: NVIDIA H100 80GB HBM3
        node-1$ nvidia-smi -L    # GPU 0: NVIDIA A100-SXM4-80GB: another model

    ## How to fix
    Ask the scheduler for one model of GPU, by a partition or a constraint on nodes (Slurm:
    `--gres=gpu:h100:8` or `--constraint`).

    Changes: The nodes on which the ranks run.

    Leaves: Nodes of one model whose GPUs run at different clocks: HNG015 names slow ranks.

    ## When it is not a defect
    The job is intended to use different GPUs, and divides its work accordingly.

    If so, add `ignore = ["ENV004"]` to `distdiag.toml`.

    ## References
    - https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """

    code = "ENV004"
    name = "differing-gpus"
    severity = Severity.INFO

    def check(self, view: SurroundingsView) -> Iterator[Finding]:
        """Compare the models of those ranks that compute on a GPU."""
        for name, found in view.differing(FactKind.DEVICE):
            models = {model: ranks for model, ranks in found.items() if model}
            if name == _NAME and len(models) > 1:
                yield differences(self, {name: models}, "GPUs", grade=Grade.NOTE)
