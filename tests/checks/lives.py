"""Events of ranks that take steps, with what their models hold at each of them."""

from distdiag.events.models import Moment
from tests.checks.models import content, plan_event, state_event

SAME = (0.5, 0.5, 0.5)
MOVING = (0.5, 0.6, 0.7)
NOTHING = (content(num_elements=0),) * 3
"""A tensor without elements, whose gradients have none, either."""


def run(lives_by_rank, plans_by_rank, *, gradients=True, steps=3):
    """All ranks take steps; rank 0, 1, … hold these contents at each of them."""
    events = []
    for rank, lives in enumerate(lives_by_rank):
        plans = plans_by_rank[rank]
        events += [plan_event(rank, plans), state_event(rank, [life[0] for life in lives])]
        for step in range(steps):
            held = [life[step] for life in lives]
            if gradients:
                moment = Moment.GRADIENT
                found = [each if each in NOTHING else 0.1 for each in held]
                events.append(state_event(rank, found, step=step, moment=moment))
            events.append(state_event(rank, held, step=step, moment=Moment.STEP))
    return events
