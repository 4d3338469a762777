"""NUM017: the gradients of two modules differ by orders of magnitude."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.num.gradient_norms import module_norms
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.updates import NUM_LOOKS, Looks, UpdateView


class ModuleImbalance(Check[UpdateView]):
    """The gradients of two modules of one optimizer differ by orders of magnitude for long.

    ## What you see
    One part of the model learns and another hardly learns, or the part with the largest gradient
    alone decides how much all gradients are clipped. The gradients of two modules differ by orders
    of magnitude over many steps.

    ## Example
        optimizer = SGD(model.parameters(), lr=1e-2)             # one rate for both
        optimizer = SGD([{"params": encoder, "lr": 1e-2},
                         {"params": head, "lr": 1e-4}])          # a rate for each

    ## How to fix
    Give the modules their own learning rates: `torch.optim.AdamW([{"params": a.parameters(), "lr":
    1e-4}, {"params": b.parameters(), "lr": 1e-3}])`. Or scale the loss of each module, or put a
    normalisation between them.

    Changes: How fast the modules learn.

    Leaves: The model and its loss.

    ## When it is not a defect
    The optimizer divides by the size of the gradients, as Adam does. It is always only a note:
    right networks have such ratios.

    If so, set `module_imbalance` in the table `[numerics]` of `distdiag.toml`.

    ## References
    - https://arxiv.org/abs/1711.02257
    """

    code = "NUM017"
    name = "module-imbalance"
    severity = Severity.WARNING

    def check(self, view: UpdateView) -> Iterator[Finding]:
        """Judge the last looked-at steps of one rank."""
        looks = view.by_rank[min(view.by_rank)][-NUM_LOOKS:]
        pairs = [_extremes(look_norms) for look_norms in _norms(looks)]
        most = view.numerics.module_imbalance
        is_steady = len(pairs) == NUM_LOOKS and len({(low, high) for low, high, _ in pairs}) == 1
        if not is_steady or not all(ratio > most for _, _, ratio in pairs):
            return
        low, high, ratio = pairs[-1]
        look = looks[-1]
        yield self.finding(
            f"the gradient of {high} is {ratio:.3g} times that of {low} in {view.title}",
            ranks=view.ranks,
            step=look.step,
            location=user_location(look.site.frames),
            subjects=(high, low),
            grade=Grade.NOTE,
            evidence=f"so it is at the last {NUM_LOOKS} steps that were looked at",
        )


def _norms(looks: Looks) -> Iterator[dict[str, float]]:
    for look in looks:
        yield {name: norm for name, norm in module_norms(look).items() if norm > 0}


def _extremes(norms: dict[str, float]) -> tuple[str, str, float]:
    """Return the modules with the least and the greatest norm, and the ratio."""
    if len(norms) < 2:
        return "", "", 0.0
    low, high = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
    return low, high, norms[high] / norms[low]
