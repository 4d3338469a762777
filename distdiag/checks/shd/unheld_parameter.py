"""SHD024: a parameter that other ranks train is in no optimizer of a rank."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.base import CallSite
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.base import View


@dataclass(frozen=True, slots=True)
class Holding:
    """What an optimizer of one rank holds: so many entries, all of which are these parameters."""

    optimizer: str
    num_entries: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnheldView(View):
    """Parameters of a model that some ranks train and these ranks do not, over sampled steps.

    On the ranks of `unheld` they had gradients, no optimizer held them and they kept their values;
    on the `holders`, which keep the same parameters or other shards of them, an optimizer held them
    and they changed, as far as there was anything of them. `held` tells what optimizers of all
    ranks hold.
    """

    model: str
    unheld: Mapping[int, tuple[str, ...]]
    holders: RankSet
    held: Mapping[int, tuple[Holding, ...]]
    num_samples: int
    sites: Mapping[int, CallSite]

    @property
    def supersedes(self) -> Hashable:
        """What was said after fewer steps."""
        return "unheld", self.model


class UnheldParameter(Check[UnheldView]):
    """A parameter that other ranks train is in no optimizer of a rank.

    ## What you see
    The loss falls, but more slowly than it should: the shards or copies of this rank keep their
    first values. The optimizer of this rank was created with parameters that are no longer those of
    the model.

    ## Example
        # wrong: parameters on meta all lie at address 0, so the last one stands for all of them
        new = {p.data_ptr(): q for p, q in zip(old_parameters, model.parameters())}
        group["params"] = [new[p.data_ptr()] for p in group["params"]]
        # right: by name, which is one of its own on every rank
        new = dict(model.named_parameters())
        group["params"] = [new[name] for name in names]

    ## How to fix
    Create the optimizer on all ranks after the model is sharded and materialised. Or replace the
    parameters in `optimizer.param_groups` by those of the model with the same names.

    Changes: These parts of the model begin to train.

    Leaves: Checkpoints that were already written: they hold parts that were never trained.

    ## When it is not a defect
    These ranks are intended to keep their part unchanged; then freeze it there
    (`requires_grad_(False)`).

    If so, add `ignore = ["SHD024"]` to `distdiag.toml`.

    ## References
    - https://github.com/axolotl-ai-cloud/axolotl/issues/3772
    """

    code = "SHD024"
    name = "unheld-parameter"
    severity = Severity.ERROR

    def check(self, view: UnheldView) -> Iterator[Finding]:
        """Name what the ranks do not hold, and what they hold instead."""
        if not view.unheld:
            return
        ranks = RankSet(view.unheld)
        names = tuple(dict.fromkeys(name for each in view.unheld.values() for name in each))
        location = user_location(view.sites[min(ranks)].frames)
        yield self.finding(
            f"{first_and_more(names)} of {view.model} have gradients, but no optimizer holds "
            f"them on {ranks.phrase()}, where they never change; optimizers of "
            f"{view.holders.phrase()} hold them",
            ranks=ranks,
            location=location,
            subjects=names,
            evidence=tuple(_evidence(view, ranks)),
        )


def _evidence(view: UnheldView, ranks: RankSet) -> Iterator[Evidence]:
    for rank in ranks:
        location = user_location(view.sites[rank].frames)
        kept = f"{len(view.unheld[rank])} parameters kept their values at {view.num_samples} steps"
        yield Evidence(ranks=RankSet([rank]), summary=kept, location=location)
    for rank, held in sorted(view.held.items()):
        for each in held:
            what = f"{each.optimizer} has {each.num_entries} entries: {first_and_more(each.names)}"
            if each.num_entries > len(each.names):
                what += ", some more than once"
            yield Evidence(ranks=RankSet([rank]), summary=what)
