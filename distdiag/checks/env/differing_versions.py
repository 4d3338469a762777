"""ENV002: ranks run different versions of the software that trains."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.surroundings import differences
from distdiag.events.environment import FactKind
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.surroundings import SurroundingsView

_COMMON: Final = frozenset(
    {"Python", "torch", "CUDA of torch", "NCCL", "cuDNN", "transformers", "deepspeed", "accelerate"}
)
"""What all ranks of a training use; others may be imported by some ranks alone."""


class DifferingVersions(Check[SurroundingsView]):
    """Ranks run different versions of the software that trains.

    ## What you see
    A collective hangs or fails at its first use, ranks build different models from the same
    configuration, or results differ in the last digits from the first step on. The ranks run
    different versions of the software.

    ## Example
        node-0$ pip list | grep torch    # torch 2.9.1
        node-1$ pip list | grep torch    # torch 2.8.0: wrong

    ## How to fix
    Install the same environment on all nodes: the same container image, or the same lock file.

    Changes: The software of the named ranks.

    Leaves: Drivers and firmware of the nodes.

    ## When it is not a defect
    The versions are known to work together, as in a heterogeneous pipeline.

    If so, add `ignore = ["ENV002"]` to `distdiag.toml`.

    ## References
    - https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """

    code = "ENV002"
    name = "differing-versions"
    severity = Severity.WARNING

    def check(self, view: SurroundingsView) -> Iterator[Finding]:
        """Name what differs, and on which ranks."""
        found = dict(view.differing(FactKind.VERSION))
        # Of a package that some ranks have not imported nothing is known there.
        known = {name: ranks for name, ranks in found.items() if "" not in ranks}
        names = [name for name in known if name in _COMMON]
        if not known:
            return
        yield differences(
            self,
            {name: known[name] for name in (names or known)},
            "versions",
            grade=Grade.PROVEN if names else Grade.NOTE,
        )
