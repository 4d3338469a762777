"""Lets ranks tell what their models hold, and collects the views."""

from __future__ import annotations

from distdiag.engine.models.models import Models
from distdiag.events.models import Moment
from distdiag.views.models import ContentView
from tests.checks.models import plan, plan_event, state_event

LATE = {"moment": Moment.STEP, "step": 1}


def all_fed(models, *events):
    return [view for event in events for view in models.feed(event)]


def fed(models, *events):
    """The views of what differs, and of plans."""
    return [view for view in all_fed(models, *events) if not isinstance(view, ContentView)]


def copies(ranks=(0, 1), names=("a", "b"), **values):
    return [plan(name, replicas=tuple(ranks), **values) for name in names]


def reported(ranks=(0, 1), **values):
    """Models whose plan these ranks have reported; they hold the same."""
    models = Models()
    plans = copies(ranks, **values)
    fed(models, *[plan_event(rank, plans) for rank in ranks])
    return models


def states(held, *, ranks=None, **values):
    """What rank 0, 1, … hold."""
    return [
        state_event(r, each, **values) for r, each in zip(ranks or range(9), held, strict=False)
    ]
