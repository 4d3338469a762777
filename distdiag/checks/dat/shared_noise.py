"""DAT006: ranks with different samples draw the same random numbers for them."""

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.data import Draw, ModelFed
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.data import FeedView

_FEWEST: Final = 2


class SharedNoise(Check[FeedView]):
    """Ranks with different samples draw the same random numbers for them.

    ## What you see
    Noise, time steps and masks are the same on all ranks, so that a step averages over as few draws
    as one rank makes. Generators that were seeded alike and used alike return the same numbers.

    ## Example
        torch.manual_seed(0)
        model = build_model()
        # wrong: the noise is the same on all ranks
        noise = torch.randn_like(latents)
        # right: seed each rank once, after the model is built
        torch.manual_seed(1000 + rank)
        noise = torch.randn_like(latents)

    ## How to fix
    Seed all ranks alike for the weights, and call `torch.manual_seed(seed + data-parallel rank)`
    after the model is built.

    Changes: The random numbers of all ranks but the first.

    Leaves: The initial weights, and the order of the samples.

    ## When it is not a defect
    The numbers are the data themselves, drawn on all ranks and divided later, or are meant to be
    shared.

    If so, add `ignore = ["DAT006"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.manual_seed.html
    """

    code = "DAT006"
    name = "shared-noise"
    severity = Severity.WARNING

    def check(self, view: FeedView) -> Iterator[Finding]:
        """Compare the generators at the first draw of each step."""
        shared = [(each, draw) for each in view.passes if (draw := _shared_draw(each)) is not None]
        if len(shared) < _FEWEST or len({draw.state for _, draw in shared}) < _FEWEST:
            return
        ranks, by_rank, draw = view.ranks, *shared[-1]
        is_sure = all(_is_noise(each, draw) for each, draw in shared) and not view.is_shared_work
        first = by_rank[min(by_rank)]
        yield self.finding(
            f"torch.{draw.api} of {list(draw.sizes)} for {view.model} yields the same numbers on "
            f"{ranks.phrase()}, whose samples differ, in {len(shared)} steps that were compared",
            ranks=ranks,
            step=first.step,
            location=user_location(draw.site.frames),
            subjects=(view.model,),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.85,
            evidence=tuple(
                Evidence(
                    ranks=RankSet(each),
                    summary=f"backward pass {each[min(each)].number}: the generator is in one "
                    f"state before torch.{d.api} of {list(d.sizes)}",
                    location=user_location(d.site.frames),
                    values={"state": d.state, "is_inside_forward": d.is_inside},
                )
                for each, d in shared
            ),
        )


def _shared_draw(by_rank: Mapping[int, ModelFed]) -> Draw | None:
    """Return the first draw for the samples of a batch, if it is the same on all ranks."""
    if len({fed.inputs for fed in by_rank.values()}) < len(by_rank):
        return None
    draws = [_first_for_samples(fed) for fed in by_rank.values()]
    first = draws[0]
    if first is None or any(draw is None or _key(draw) != _key(first) for draw in draws):
        return None
    return first


def _key(draw: Draw) -> tuple[object, ...]:
    return (draw.api, draw.sizes[:1], draw.state)


def _first_for_samples(fed: ModelFed) -> Draw | None:
    """Return the first draw of as many rows as there are samples, noise rather than data."""
    draws = [draw for draw in fed.draws if draw.sizes and draw.sizes[0] in fed.batch_sizes]
    # What a generator of its own yields, or what is drawn before the model, may be the samples.
    return min(draws, key=lambda draw: (not draw.is_inside, draw.is_given), default=None)


def _is_noise(by_rank: Mapping[int, ModelFed], draw: Draw) -> bool:
    """Say whether it cannot be the samples themselves that are drawn, to be divided later."""
    batches = {fed.batch for fed in by_rank.values()}
    return draw.is_inside or ("" not in batches and len(batches) == len(by_rank))
