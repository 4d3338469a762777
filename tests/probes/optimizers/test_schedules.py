from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from distdiag.events.data import MetricGiven, ScheduleState
from tests.probes.conftest import Observed


@pytest.mark.parametrize("pace", [1, 2])
def test_how_often_a_scheduler_is_advanced_is_reported(observed: Observed, pace: int) -> None:
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

    (reported,) = observed.events(ScheduleState)
    assert reported.name == "LinearLR"
    assert (reported.least_pace, reported.greatest_pace) == (pace, pace)
    assert reported.num_steps == 12
    assert reported.num_advances == 12 * pace
    assert reported.peak_rate == 1.0
    assert reported.last_rate == 0.0
    assert reported.settled_at == 8 // pace
    assert reported.site.location is not None


def test_a_scheduler_that_is_gone_is_reported_at_the_end(observed: Observed) -> None:
    observed.install("steps", "data")

    def ended(rate: float) -> None:
        weight = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=rate)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
        for _ in range(6):
            weight.square().sum().backward()
            optimizer.step()
            scheduler.step()

    ended(1.0)
    ended(2.0)
    for probe in observed.probes:
        probe.flush()

    reported = observed.events(ScheduleState)
    assert [(each.name, each.num_steps, each.peak_rate) for each in reported] == [
        ("LinearLR", 6, 1.0),
        ("LinearLR#2", 6, 2.0),
    ]


def test_later_stages_of_a_training_do_not_count_as_its_steps(observed: Observed) -> None:
    observed.install("steps", "data")
    weights = [torch.ones(1, requires_grad=True) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], lr=1.0) for weight in weights)
    scheduler = torch.optim.lr_scheduler.LinearLR(first, 1.0, 0.0, total_iters=4)
    for optimizer, weight in [(first, weights[0])] * 4 + [(second, weights[1])] * 8:
        weight.square().sum().backward()
        optimizer.step()
        if optimizer is first:
            scheduler.step()
    for probe in observed.probes:
        probe.flush()
    assert observed.events(ScheduleState)[-1].num_steps == 4

    first.param_groups[0]["lr"] = 0.5  # a new stage, or another scheduler
    first.step()
    for probe in observed.probes:
        probe.flush()
    assert observed.events(ScheduleState)[-1].last_rate == 0.5


def test_the_planned_number_of_training_steps_is_reported(observed: Observed) -> None:
    observed.install("steps", "data")

    def rate(step: int, *, num_training_steps: int) -> float:
        return abs(1 - step / num_training_steps)

    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    function = functools.partial(rate, num_training_steps=12)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, function)
    for _ in range(12):
        weight.square().sum().backward()
        optimizer.step()
        for _ in range(2):
            scheduler.step()
    for probe in observed.probes:
        probe.flush()

    (reported,) = observed.events(ScheduleState)
    assert (reported.num_planned, reported.num_advances, reported.num_steps) == (12, 24, 12)
    assert (reported.least_pace, reported.greatest_pace) == (2, 2)


def _after_validation(observed: Observed, values: list[float], times: int) -> ScheduleState:
    observed.install("steps", "data")
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    for value in values:
        for _ in range(3):
            weight.square().sum().backward()
            optimizer.step()
        for _ in range(times):
            scheduler.step(value)
    for probe in observed.probes:
        probe.flush()
    (reported,) = observed.events(ScheduleState)[-1:]
    assert reported.num_advances == len(values) * times
    return reported


@pytest.mark.parametrize("times", [1, 2])
def test_how_often_a_scheduler_is_given_each_value_is_reported(
    observed: Observed, times: int
) -> None:
    values = [1.0, 1.0, 1.5, 1.2, 1.0]  # the same value of another epoch is another one
    reported = _after_validation(observed, values, times)
    assert (reported.name, reported.follows_metric) == ("ReduceLROnPlateau", True)
    assert (reported.least_pace, reported.greatest_pace) == (times, times)
    assert [(each.number, each.value) for each in observed.events(MetricGiven)] == list(
        enumerate(values)
    )


def test_different_values_after_one_another_are_no_repetition(observed: Observed) -> None:
    observed.install("steps", "data")
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for epoch in range(4):
        weight.square().sum().backward()
        optimizer.step()
        for held in range(3):  # as after a resume that replays the history, or several data sets
            scheduler.step(torch.tensor(1.0 + held - 0.1 * epoch))
    for probe in observed.probes:
        probe.flush()
    (reported,) = observed.events(ScheduleState)
    assert (reported.least_pace, reported.greatest_pace) == (1, 1)


class Polynomial(torch.optim.lr_scheduler.LRScheduler):
    """A schedule of the program's own, which may count less often than it is advanced."""

    def __init__(self, optimizer: torch.optim.Optimizer, total: int, every: int = 1) -> None:
        self.total, self.every = total, every
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        left = 1 - min(self.last_epoch // self.every, self.total) / self.total
        return [base * (0.1 + left) for base in self.base_lrs]


def _lambda(optimizer: torch.optim.Optimizer, every: int) -> object:
    total_steps = 8
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.1 + max(0.0, 1 - step // every / total_steps)
    )


@pytest.mark.parametrize("is_lambda", [False, True], ids=["a class", "a lambda"])
@pytest.mark.parametrize(("every", "planned"), [(1, 8), (2, 0)], ids=["too fast", "meant so"])
def test_a_number_of_steps_in_the_program_s_own_words_is_believed_where_the_rate_settles(
    observed: Observed, is_lambda: bool, every: int, planned: int
) -> None:
    observed.install("steps", "data")
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler: Any = _lambda(optimizer, every) if is_lambda else Polynomial(optimizer, 8, every)
    for _ in range(8):
        weight.square().sum().backward()
        optimizer.step()
        scheduler.step()
        scheduler.step()
    for probe in observed.probes:
        probe.flush()

    (reported,) = observed.events(ScheduleState)
    assert (reported.num_planned, reported.num_advances, reported.num_steps) == (planned, 16, 8)
