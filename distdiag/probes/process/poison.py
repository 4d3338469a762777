"""The active mode ``--poison-empty``: memory that nobody writes holds NaN until the first step."""

from typing import ClassVar

import torch
import torch.utils.deterministic

from distdiag.probes.base import Probe
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal


class PoisonedMemory(Probe):
    """Lets torch fill what `torch.empty` and `to_empty` reserve, with NaN or the largest integer.

    torch does so in its deterministic mode only, which therefore is on, too, with warnings instead
    of errors, until the first optimizer step has ended or the script changes it itself.
    """

    name: ClassVar[str] = "poison-empty"

    def __init__(self, recorder: Recorder, step_ended: Signal[[]]) -> None:
        super().__init__(recorder)
        self._step_ended = step_ended
        self._before: tuple[bool, bool, bool] | None = None

    def _install(self) -> None:
        self._before = _mode()
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        self._subscribe(self._step_ended, self._give_back)

    def uninstall(self) -> None:
        """Leave memory as it is found again."""
        self._give_back()
        super().uninstall()

    def _give_back(self) -> None:
        before, self._before = self._before, None
        if before is None or _mode() != (True, True, True):
            return  # done already, or the script has its own mind
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]  # type: ignore[attr-defined]


def _mode() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        bool(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
    )
