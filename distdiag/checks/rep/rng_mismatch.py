"""REP005: ranks draw different random numbers where they should draw the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distdiag.checks.base import Check
from distdiag.events.random import RandomDraw, RandomState
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import RandomView


class RngMismatch(Check[RandomView]):
    """Ranks draw different random numbers where they should draw the same.

    ## What it detects
    A random operation on a DTensor before which the generator is not in the same state on all ranks
    of its mesh: a warning if ranks hold copies of what is drawn, else a note. Tensor-parallel ranks
    whose default generators differ while the model has dropout are a note.

    ## Why it matters
    Copies that are drawn apart are different from then on: dropout masks on replicated activations,
    weights that are initialised on each rank.

    ## Example
    `torch.manual_seed(seed + rank)` in a program whose ranks form a tensor-parallel group.

    ## How to fix
    Seed by the coordinate along the data-parallel axis only, the same within each model replica.

    ## References
    - `torch.distributed.tensor.random.manual_seed`
    """

    code = "REP005"
    name = "rng-mismatch"
    severity = Severity.WARNING

    why = "DTensor takes it that all ranks of a mesh have the same generator, and does not compare."
    fix = "Seed all ranks of the mesh alike, for instance by their data-parallel rank alone."
    fix_changes = "The random numbers, and so the run as a whole."
    fix_leaves = "What was drawn before: initialise it again, or broadcast it."
    disproof = "The state of the generator is the same on these ranks before the operation."

    def check(self, alignment: RandomView) -> Iterator[Finding]:
        """Compare the states of the ranks."""
        draws = {r: e for r, e in alignment.by_rank.items() if isinstance(e, RandomDraw)}
        if draws and len({draw.digest for draw in draws.values()}) > 1:
            yield self._about_draw(draws)
        states = {r: e for r, e in alignment.by_rank.items() if isinstance(e, RandomState)}
        for name in _differing(states):
            yield self._about(
                f"the {name} generators of {RankSet(states).phrase()} differ, which compute on the "
                "same activations and have dropout",
                states,
                {rank: _digest(state, name) for rank, state in states.items()},
                Grade.NOTE,
            )

    def _about_draw(self, draws: Mapping[int, RandomDraw]) -> Finding:
        apart = {
            rank
            for rank, draw in draws.items()
            if any(draws[other].digest != draw.digest for other in draw.replicas if other in draws)
        }
        what = "copies of a DTensor" if apart else "parts of a DTensor"
        ranks = RankSet(apart or draws)
        return self._about(
            f"{ranks.phrase()} draw random numbers for {what} from generators in different states",
            draws,
            {rank: draw.digest for rank, draw in draws.items()},
            Grade.LIKELY if apart else Grade.NOTE,
            ranks,
        )

    def _about(
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
