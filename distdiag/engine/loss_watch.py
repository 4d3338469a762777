"""Shows the losses of all ranks to the checks, and knows whether there were any."""

from __future__ import annotations

from distdiag.engine.judges import Judges
from distdiag.engine.loss_windows import LossWindows
from distdiag.event import ProbeDisabled
from distdiag.loss_event import LossWeights
from distdiag.model_view import View
from distdiag.ranks import RankSet


class LossWatch:
    """Feed the losses of the ranks as they come."""

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Watch the losses of these ranks."""
        self._judges = judges
        self._windows = LossWindows(world)
        self._is_read = False
        self._blind: set[int] = set()

    @property
    def not_checked(self) -> dict[str, str]:
        """The codes of the checks of losses, if not all losses were seen, and why."""
        if self._blind:
            why = f"the losses of {RankSet(self._blind).phrase()} are not observed wholly"
        elif not self._is_read:
            why = "no loss was seen of a kind that can be weighed"
        else:
            return {}
        return {check.code: why for check in self._judges.needing(LossWeights)}

    def note(self, view: View) -> None:
        """Take note of what is known of a model."""
        self._windows.note(view)

    def feed(self, event: LossWeights | ProbeDisabled) -> None:
        """Take in one event of one rank."""
        if isinstance(event, ProbeDisabled):
            if event.probe == "losses":
                self._blind.add(event.rank)
            return
        self._is_read = self._is_read or any(event.passes)
        view = self._windows.add(event)
        if view is not None:
            self._judges.judge_losses(view)
