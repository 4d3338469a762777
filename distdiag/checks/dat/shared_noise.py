"""DAT006: ranks with different samples draw the same random numbers for them."""

from collections.abc import Iterator
from os.path import basename
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.base import CallSite
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.relations import Axis, MaskView, Relation

_OF_PARTS: Final = (
    "Draw here from a generator whose state is another one on each of these ranks, and leave the "
    "others as they are: with Megatron `with get_cuda_rng_tracker().fork():` around the layer, by "
    "hand a `torch.Generator` seeded by `seed + rank`. See whether such a block is there and is "
    "not entered."
)
_MOST_CALLERS: Final = 2
"""A function that seeds is called where the program decides by what."""


class SharedNoise(Check[MaskView]):
    """Ranks with different samples draw the same random numbers for them.

    ## What you see
    Dropout masks, noise and time steps are the same on all ranks, so that a step averages over as
    few draws as one rank makes. Generators that were seeded alike and used alike return the same
    numbers; so do those that were never seeded.

    ## Example
        torch.manual_seed(0)
        model = build_model()
        # wrong: dropout draws the same masks on all ranks
        train(model)
        # right: seed each rank once, after the model is built
        torch.manual_seed(1000 + rank)
        train(model)

    ## How to fix
    Build the model with one seed on all ranks, and then call `torch.manual_seed(seed + rank)`, with
    the rank among those that share the batch (accelerate: `set_seed(seed, device_specific=True)`).

    Changes: The random numbers of all ranks but the first.

    Leaves: The initial weights, and the order of the samples.

    ## When it is not a defect
    The numbers are the data themselves, drawn on all ranks and divided later, or are meant to be
    shared, as in a comparison with one rank.

    If so, add `ignore = ["DAT006"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.manual_seed.html
    """

    code = "DAT006"
    name = "shared-noise"
    severity = Severity.WARNING

    def check(self, view: MaskView) -> Iterator[Finding]:
        """Name the first draw that ranks have in common although they should not."""
        if view.cell.relation is not Relation.DIFFERENT:
            return
        last = view.draws[-1]
        first = min(last)
        draw, fed = last[first], view.passes[-1][first]
        where = f"in {draw.module} of {view.model}" if draw.module else f"for {view.model}"
        differ = "activations" if draw.activation else "samples"
        yield self.finding(
            f"torch.{draw.api} of {list(draw.sizes)} {where} draws the same numbers on "
            f"{view.ranks.phrase()}, whose {differ} differ, in {len(view.draws)} steps that were "
            f"compared{view.doubt}",
            ranks=view.ranks,
            step=fed.step,
            location=user_location(draw.site.frames),
            subjects=(view.model, *(draw.module.split()[:1])),
            grade=Grade.NOTE if view.doubt else Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(_evidence(view)),
            fix=self.fix if view.axis is Axis.DATA else _OF_PARTS,
        )


def _evidence(view: MaskView) -> Iterator[Evidence]:
    seeded = view.passes[-1][min(view.ranks)].seeded
    if seeded is not None:
        yield Evidence(
            ranks=view.ranks,
            summary=f"torch.manual_seed was called last by {_callers(seeded)}",
            location=user_location(seeded.frames),
        )
    draws = [by_rank[min(by_rank)] for by_rank in view.draws]
    numbers = [str(by_rank[min(by_rank)].number) for by_rank in view.passes]
    yield Evidence(
        ranks=view.ranks,
        summary=f"before torch.{draws[-1].api} the generator has the same state on these ranks, in "
        f"each of the backward passes {', '.join(numbers)}",
        location=user_location(draws[-1].site.frames),
        values={"state": draws[-1].state, "is_inside_forward": draws[-1].is_inside},
    )
    yield Evidence(
        ranks=view.ranks,
        summary=f"the ranks are {view.axis}, as {view.known_by}: {view.cell.reason}",
    )


def _callers(site: CallSite) -> str:
    """Return ``set_seed (train.py:12), main (train.py:40)``: the program's own functions."""
    frames = [frame for frame in site.frames if frame.user][:_MOST_CALLERS]
    return ", ".join(f"{f.function} ({basename(f.file)}:{f.line})" for f in frames) or "a library"
