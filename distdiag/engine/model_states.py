"""Puts the parts of plans and states of models together again, for each rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdiag.model_event import Content, ModelPlan, ModelState, Moment, TensorPlan

Key = tuple[str, Moment, int, int]
"""A model, a moment, a step, and how often it had come in that step before."""


@dataclass(slots=True)
class RankModels:
    """The models of one rank as far as they have been told."""

    plans: dict[str, tuple[TensorPlan, ...]] = field(default_factory=dict)
    _plan_parts: dict[str, list[TensorPlan]] = field(default_factory=dict)
    _state_parts: dict[tuple[str, Moment], list[Content | None]] = field(default_factory=dict)
    _counts: dict[tuple[str, Moment, int], int] = field(default_factory=dict)

    def add_plan(self, event: ModelPlan) -> bool:
        """Take in a part of a plan; return whether the plan is complete now."""
        parts = self._plan_parts.setdefault(event.model, [])
        if event.first == 0:
            parts.clear()
        parts += event.tensors
        if event.first + len(event.tensors) < event.total or len(parts) != event.total:
            return False
        self.plans[event.model] = tuple(parts)
        return True

    def add_state(self, event: ModelState) -> tuple[Key, list[Content | None]] | None:
        """Take in a part of a state; return the state when it is complete and its plan is known."""
        parts = self._state_parts.setdefault((event.model, event.moment), [])
        if event.first == 0:
            parts.clear()
        parts += event.contents
        if event.first + len(event.contents) < event.total or len(parts) != event.total:
            return None
        if len(self.plans.get(event.model, ())) != event.total:
            return None
        seen = (event.model, event.moment, event.step)
        count = self._counts[seen] = self._counts.get(seen, -1) + 1
        return (*seen, count), list(parts)
