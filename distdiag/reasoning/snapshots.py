"""What one look at the stacks of a job tells, where no records of calls are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from distdiag.alignment import Fate, RankState
from distdiag.event import Frame
from distdiag.finding import Location
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import main_stack, user_location

_COLLECTIVE_FILES: Final = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
_NO_WAIT: Final = frozenset(
    {"init_process_group", "destroy_process_group", "get_rank", "is_initialized"}
)


@dataclass(frozen=True, slots=True)
class Standpoint:
    """Where some ranks stand: in the function `call` of torch (None: in none), at `location`."""

    call: str | None
    location: Location | None
    ranks: RankSet

    def __str__(self) -> str:
        """Return it as the end of ``rank 3 …``."""
        place = f" at {self.location}" if self.location is not None else ""
        return f"waits in {self.call}{place}" if self.call else f"is{place or ' in no known line'}"


def standpoints(states: Mapping[int, RankState]) -> tuple[Standpoint, ...]:
    """Group ranks of which nothing but stacks is known by where they stand, largest group first.

    Empty if records of any rank were read: these say more.
    """
    if any(state.fate is not Fate.SILENT for state in states.values()):
        return ()
    ranks_at: dict[tuple[str | None, Location | None], list[int]] = {}
    for rank, state in states.items():
        stack = main_stack(state.stacks)
        if stack:
            ranks_at.setdefault((_call_in(stack), user_location(stack)), []).append(rank)
    found = [Standpoint(call, place, RankSet(ranks)) for (call, place), ranks in ranks_at.items()]
    return tuple(sorted(found, key=lambda each: (-len(each.ranks), min(each.ranks))))


def _call_in(stack: tuple[Frame, ...]) -> str | None:
    """Return the public function of torch.distributed that a stack is inside of."""
    for frame in reversed(stack):
        if frame.file.replace("\\", "/").endswith(_COLLECTIVE_FILES):
            name = frame.function
            if not name.startswith("_") and name not in _NO_WAIT and name != "wrapper":
                return name
    return None
