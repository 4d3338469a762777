"""Curves: what a run logged of one quantity at one step after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """The values of one quantity, in the order in which they were logged.

    `steps`, `values` and `lines` have one element for each value: the step that the log names
    (float64, for epochs are often fractions; the number of the value where the log names none),
    the value (float64; NaN and infinities are kept as they were written), and the line of the file
    (int64, from 1; 0 where a format has no lines). `times` are seconds since the epoch, or None.
    """

    name: str
    steps: Floats
    values: Floats
    lines: npt.NDArray[np.int64]
    times: Floats | None = None

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """All that one source holds of one rank in one attempt of a run.

    `format` is what the source was read as (``megatron``, ``trainer-state``, ``tensorboard``, ...).
    `rank` is None where nothing names one. `attempt` counts restarts from 0. `series` are by the
    names in the log; `roles` names the one that is the ``loss``, ``val_loss``, ``grad_norm``,
    ``lr``, ``throughput``, ``step_time_s``, ``loss_scale``, ``kl``, ``reward``, ``entropy`` or
    ``memory``, by the role.
    """

    source: Path
    format: str
    series: Mapping[str, Series]
    roles: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None
    attempt: int = 0

    def of(self, role: str) -> Series | None:
        """Return the series that plays a role, None if there is none."""
        return self.series.get(self.roles.get(role, ""))
