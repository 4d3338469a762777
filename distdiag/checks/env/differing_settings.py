"""ENV003: ranks run with different settings of NCCL or of their arithmetic."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.surroundings import differences
from distdiag.events.environment import FactKind
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.surroundings import SurroundingsView

_AGREED: Final = frozenset(
    {
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_NET",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_CTAS",
        "NCCL_MAX_CTAS",
        "NCCL_NTHREADS",
        "NCCL_BUFFSIZE",
        "NCCL_CROSS_NIC",
        "NCCL_COLLNET_ENABLE",
        "NCCL_NVLS_ENABLE",
        "NCCL_IB_DISABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
    }
)
"""What the ranks of a communicator agree upon, or by which they choose their way to one another."""
_ARITHMETIC: Final = frozenset(
    {
        "default dtype",
        "deterministic algorithms",
        "float32 matmul precision",
        "cudnn.allow_tf32",
        "NVIDIA_TF32_OVERRIDE",
        "CUBLAS_WORKSPACE_CONFIG",
    }
)
"""What changes the numbers that a rank computes."""


class DifferingSettings(Check[SurroundingsView]):
    """Ranks run with different settings of NCCL or of their arithmetic.

    ## What you see
    The first collective hangs or is slow, or copies of the weights drift apart in their last
    digits. A variable that is set in the shell of one node does not reach the other nodes.

    ## Example
        node-0$ NCCL_P2P_DISABLE=1 torchrun --nnodes 2 ... train.py    # wrong: not on node-1
        node-1$ torchrun --nnodes 2 ... train.py

    ## How to fix
    Set the variable for all nodes, in the job script or the image.

    Changes: How the named ranks communicate or compute.

    Leaves: Variables that name devices or networks of one node.

    ## When it is not a defect
    The nodes have different hardware and need different settings.

    If so, add `ignore = ["ENV003"]` to `distdiag.toml`.

    ## References
    - https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """

    code = "ENV003"
    name = "differing-settings"
    severity = Severity.WARNING

    def check(self, view: SurroundingsView) -> Iterator[Finding]:
        """Name what differs, and on which ranks."""
        found = dict(view.differing(FactKind.VARIABLE, FactKind.SETTING))
        agreed = {name: ranks for name, ranks in found.items() if name in _AGREED}
        numbers = {name: ranks for name, ranks in found.items() if name in _ARITHMETIC}
        if agreed:
            yield differences(self, agreed, "settings of NCCL")
        if numbers:
            # A script may choose by rank what it computes with, such as on a teacher.
            yield differences(self, numbers, "settings of their arithmetic", grade=Grade.NOTE)
