from __future__ import annotations

import pytest
import torch

from distdiag.data_event import ScheduleState
from tests.probes.conftest import Observed


@pytest.mark.parametrize("pace", [1, 2])
def test_how_often_a_scheduler_is_advanced_is_told(observed: Observed, pace: int) -> None:
    observed.install("steps", "data")
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
    for _ in range(12):
        weight.square().sum().backward()
        optimizer.step()
        for _ in range(pace):
            scheduler.step()
    for probe in observed.probes:
        probe.flush()

    (told,) = observed.events(ScheduleState)
    assert told.name == "LinearLR"
    assert (told.least_pace, told.greatest_pace) == (pace, pace)
    assert told.num_steps == 12
    assert told.num_advances == 12 * pace
    assert told.peak_rate == 1.0
    assert told.last_rate == 0.0
    assert told.settled_at == 8 // pace
    assert told.site.location is not None
