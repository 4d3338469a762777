"""What one part of the matrix records: which cells, seeds and mutations, and below which folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from scripts.parity_matrix.cells import CELLS, Cell
from scripts.parity_matrix.models import KITS
from scripts.parity_matrix.mutations import CLEAN, MUTATIONS, applies

REFERENCES: Final = ("reference", "again", "perturbed")


class Run(msgspec.Struct, frozen=True):
    """One recorded run of the matrix."""

    cell: str
    seed: int
    mutation: str

    def folder(self, root: Path) -> Path:
        """Return where it is recorded."""
        return root / self.cell / str(self.seed) / self.mutation


class Part(msgspec.Struct, frozen=True):
    """All cells of one model in one precision, recorded below `folder`."""

    folder: str
    model: str
    precision: str
    seeds: tuple[int, ...]
    cells: tuple[str, ...]
    mutations: tuple[str, ...] = tuple(MUTATIONS)
    num_steps: int = 4

    @property
    def label(self) -> str:
        """How the part is called."""
        return f"{self.model} {self.precision}"

    def used_cells(self) -> Iterator[Cell]:
        """Yield the cells that apply to the model."""
        for name in self.cells:
            if not CELLS[name].why_not(KITS[self.model]):
                yield CELLS[name]

    def runs(self, num_ranks: int | None = None) -> Iterator[Run]:
        """Yield the candidates, those on this number of ranks only if it is given."""
        for cell in self.used_cells():
            if num_ranks is not None and cell.num_ranks != num_ranks:
                continue
            for seed in self.seeds:
                for name in dict.fromkeys((CLEAN, *self.mutations)):
                    if applies(name, cell):
                        yield Run(cell.name, seed, name)

    def write(self) -> Path:
        """Keep the part in a file for the processes that record it."""
        path = Path(self.folder) / "part.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(self))
        return path


def read_part(path: str) -> Part:
    """Return the part in a file."""
    return msgspec.json.decode(Path(path).read_bytes(), type=Part)
