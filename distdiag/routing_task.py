"""What the ranks of a run are told whose choices of experts are compared with another run's."""

from __future__ import annotations

from pathlib import Path

import msgspec

from distdiag.errors import UNDECODABLE, UsageError


class RoutingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the runs of a script that are compared.

    Each rank writes what it records below `folder`, and ends after `num_steps` optimizer steps.
    `seed` seeds the default generators before the script does; None leaves them.
    """

    folder: str
    num_steps: int
    seed: int | None = None

    def write(self, path: Path) -> None:
        """Keep the task in a file for the ranks."""
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: str) -> RoutingTask:
        """Return the task in a file.

        Raises:
            UsageError: it cannot be read, or is something else.

        """
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, *UNDECODABLE) as error:
            raise UsageError(f"{path}: not the task of a recording: {error}") from None
