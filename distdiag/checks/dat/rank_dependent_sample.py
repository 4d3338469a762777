"""DAT015: a sample of a data set that ranks divide is not the same on all of them."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.data import PartCounts, SampleContentsView

_FEWEST: Final = 8
"""So many samples in a row are not the same, or other ones, by chance."""


class RankDependentSample(Check[SampleContentsView]):
    """A sample of a data set that ranks divide is not the same on all of them.

    ## What you see
    Training works, and worse than on one GPU: a number in a sample, such as an identity or a label,
    means one thing on this rank and another on that. Each rank is consistent in itself.

    ## Example
        # wrong: the hash of a text is another one in each process
        group = hash(name) % num_groups

        # right
        group = sorted(names).index(name)

    ## How to fix
    Make such numbers from the data alone: from their sorted order, or by `hashlib`. Not from
    `hash()` of texts, the order of a set or of a listing, or numbers that are drawn by rank.

    Changes: All ranks train on the same data.

    Leaves: What a model has learnt with mixed numbers.

    ## When it is not a defect
    The part is drawn once for each rank on purpose, such as negative examples.

    To silence it, set `ignore = ["DAT015"]` in `distdiag.toml`.

    ## References
    - https://github.com/sktime/pytorch-forecasting/issues/2293
    - https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED
    """

    code = "DAT015"
    name = "rank-dependent-sample"
    severity = Severity.WARNING

    def check(self, view: SampleContentsView) -> Iterator[Finding]:
        """Compare whole numbers of samples whose other parts are the same on all ranks."""
        if not any(_is_same(part) for part in view.parts):
            return  # ranks may have data of their own under the same indices
        found = [part for part in view.parts if part.is_whole and _depends_on_rank(part)]
        if not found:
            return
        first = view.passes[min(view.passes)]
        names = ", ".join(f"`{part.name}`" for part in found)
        location = user_location(first.site.frames)
        if first.fetched_by is not None:
            location = user_location(first.fetched_by.frames) or location
        yield self.finding(
            f"{names} of a sample of {first.dataset} is not the same on all ranks: of "
            f"{found[0].num_shared} samples that came on several of them it differs in "
            f"{found[0].num_different}, and on one rank it is always the same",
            ranks=RankSet(view.passes),
            step=first.step,
            location=location,
            subjects=(first.stream,),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(
                Evidence(
                    ranks=RankSet(view.passes),
                    summary=f"`{part.name}`: {part.num_changed} of {part.num_again} changed when "
                    f"the rank read them again, {part.num_different} of {part.num_shared} differ "
                    "between ranks",
                )
                for part in view.parts
            ),
        )


def _is_same(part: PartCounts) -> bool:
    return part.num_shared >= _FEWEST and part.num_different == 0 and part.num_changed == 0


def _depends_on_rank(part: PartCounts) -> bool:
    is_steady = part.num_again >= _FEWEST and part.num_changed == 0
    return is_steady and part.num_shared >= _FEWEST and 2 * part.num_different >= part.num_shared
