"""REP006: ranks evaluate one model by different running statistics."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import (
    evidence_of,
    first_and_more,
    location_on,
    names_of,
    odd_ranks,
)
from distdiag.events.models import ReplicaEvidence
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.models import EvaluationReplicas

_WRAPPED: Final = (ReplicaEvidence.WRAPPER, ReplicaEvidence.UNSYNCED)


class UnsharedStatistics(Check[EvaluationReplicas]):
    """Ranks evaluate one model by different running statistics.

    ## What you see
    Each rank evaluates a different model, so the metric mixes several models, and the checkpoint
    holds one of them. Layers like batch normalisation keep a mean and a variance of the samples of
    their own rank only, and the reduction of gradients does not touch them.

    ## Example
        # wrong: nobody sends the statistics round
        model = DistributedDataParallel(net, broadcast_buffers=False)
        # right
        model = DistributedDataParallel(net)

    ## How to fix
    Leave `broadcast_buffers=True` of DDP (`forward_sync_buffers=True` in newer versions). Or
    convert the model with `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`, which needs GPUs,
    or average `running_mean` and `running_var` over the ranks before each evaluation and
    checkpoint.

    Changes: The statistics by which ranks evaluate, and so the metric.

    Leaves: The parameters, which were trained by the statistics of each batch.

    ## When it is not a defect
    Each rank is intended to evaluate with the statistics of its own samples, for example for its
    own domain.

    If so, add `ignore = ["REP006"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
    """

    code = "REP006"
    name = "unshared-statistics"
    severity = Severity.WARNING

    def check(self, view: EvaluationReplicas) -> Iterator[Finding]:
        """Name what differs where one wrapper keeps the model."""
        if view.evidence not in _WRAPPED:
            return
        names = names_of(view.tensors)
        ranks, _ = odd_ranks(view.tensors)
        yield self.finding(
            f"{first_and_more(names)} of {view.model}: {view.ranks.phrase()} evaluate with "
            f"different running statistics after step {view.step}",
            ranks=ranks,
            step=view.step,
            location=location_on(view, ranks),
            subjects=names,
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=evidence_of(view, view.tensors),
        )
