"""REP005: ranks draw different random numbers where they should draw the same."""

from collections.abc import Iterator, Mapping

from distdiag.checks.base import Check
from distdiag.events.random import RandomDraw, RandomState
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import RandomView
from distdiag.views.relations import MaskView, Relation


class RngMismatch(Check[RandomView | MaskView]):
    """Ranks draw different random numbers where they should draw the same.

    ## What you see
    Values that should be equal on these ranks differ: dropout masks on an activation that the ranks
    share, or weights that each rank initialises. DTensor expects the same generator state on all
    ranks of a mesh, and does not compare it.

    ## Example
        # wrong: tensor-parallel ranks get different seeds
        torch.manual_seed(seed + rank)
        # right
        torch.manual_seed(seed + mesh["dp"].get_local_rank())

    ## How to fix
    Call `torch.manual_seed(seed + dp_rank)` with the rank in the data-parallel group only, so that
    all ranks of one copy of the model have the same generator state.

    Changes: The random numbers, and so the whole run.

    Leaves: Values that were drawn before: initialise them again, or broadcast them.

    ## When it is not a defect
    The ranks draw for different parts of a tensor, and each rank is intended to draw its own
    numbers.

    If so, add `ignore = ["REP005"]` to `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/blob/main/torch/distributed/tensor/_random.py
    """

    code = "REP005"
    name = "rng-mismatch"
    severity = Severity.WARNING
    explains = ("SHD004", "REP003")

    def check(self, view: RandomView | MaskView) -> Iterator[Finding]:
        """Compare the states of the ranks."""
        if isinstance(view, MaskView):
            if view.cell.relation is Relation.EQUAL and view.draws:
                yield self._of_masks(view)
            return
        draws = {r: e for r, e in view.by_rank.items() if isinstance(e, RandomDraw)}
        if draws and len({draw.digest for draw in draws.values()}) > 1:
            yield self._of_draws(draws)
        states = {r: e for r, e in view.by_rank.items() if isinstance(e, RandomState)}
        for name in _differing(states):
            yield self._finding(
                f"{RankSet(states).phrase()} share activations of a model with dropout, but their "
                f"{name} generators are in different states",
                states,
                {rank: _digest(state, name) for rank, state in states.items()},
                Grade.NOTE,
            )

    def _of_masks(self, view: MaskView) -> Finding:
        draws, fed = view.draws[0], view.passes[0][min(view.ranks)]
        draw = draws[min(draws)]
        where = f"in {draw.module} of {view.model}" if draw.module else f"for {view.model}"
        states = ((rank, each.state) for rank, each in draws.items())
        return self.finding(
            f"torch.{draw.api} of {list(draw.sizes)} {where} draws different random numbers on "
            f"{view.ranks.phrase()}, although these ranks hold the same activation there",
            ranks=view.ranks,
            step=fed.step,
            location=user_location(draw.site.frames),
            subjects=(view.model, *draw.module.split()[:1]),
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=(
                *(
                    Evidence(
                        ranks=RankSet([rank]),
                        summary=f"the state of the generator has the digest {state}",
                    )
                    for rank, state in states
                ),
                Evidence(
                    ranks=view.ranks,
                    summary=f"the ranks are {view.axis}, as {view.known_by}: {view.cell.reason}",
                ),
            ),
        )

    def _of_draws(self, draws: Mapping[int, RandomDraw]) -> Finding:
        unequal = {
            rank
            for rank, draw in draws.items()
            if any(draws[other].digest != draw.digest for other in draw.replicas if other in draws)
        }
        what = "copies of a DTensor" if unequal else "parts of a DTensor"
        ranks = RankSet(unequal or draws)
        return self._finding(
            f"{ranks.phrase()} draw random numbers for {what} from generators in different states",
            draws,
            {rank: draw.digest for rank, draw in draws.items()},
            Grade.LIKELY if unequal else Grade.NOTE,
            ranks,
        )

    def _finding(
        self,
        message: str,
        events: Mapping[int, RandomDraw | RandomState],
        digests: Mapping[int, str],
        grade: Grade,
        ranks: RankSet | None = None,
    ) -> Finding:
        ranks = ranks or RankSet(events)
        first = events[min(ranks)]
        return self.finding(
            message,
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            grade=grade,
            confidence=0.85,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"the state of the generator has the digest {digest}",
                    location=user_location(events[rank].site.frames),
                )
                for rank, digest in digests.items()
            ),
        )


def _differing(states: Mapping[int, RandomState]) -> list[str]:
    """Return the first generator on the devices that compute which is not the same everywhere."""
    if any(state.moment == "start" for state in states.values()):
        return []  # seeded later, perhaps
    names = [each.name for state in states.values() for each in state.generators]
    used = "cuda" if "cuda" in names else "cpu"
    digests = {_digest(state, used) for state in states.values()}
    return [used] if len(digests) > 1 and "" not in digests else []


def _digest(state: RandomState, name: str) -> str:
    return next((each.digest for each in state.generators if each.name == name), "")
