from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distdiag.events.base import Phase
from distdiag.events.lifecycle import StepEnd
from tests.probes.conftest import Observed


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


class Container(torch.optim.Optimizer):
    """An optimizer made of optimizers, each of which fires the hooks of torch."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([p for part in parts for p in part.param_groups[0]["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def test_a_step_ends_with_the_optimizer(observed: Observed) -> None:
    observed.install("steps")
    model, optimizer = _model()

    for _ in range(3):
        _backward(model)
        optimizer.step()

    ends = observed.events(StepEnd)
    assert [end.step for end in ends] == [0, 1, 2]
    assert [end.num_backwards for end in ends] == [1, 1, 1]
    assert observed.recorder.step == 3


def test_accumulated_backwards_belong_to_one_step(observed: Observed) -> None:
    observed.install("steps")
    model, optimizer = _model()

    for _ in range(4):
        _backward(model)
    optimizer.step()

    (end,) = observed.events(StepEnd)
    assert end.num_backwards == 4


def test_a_container_of_optimizers_is_one_step(observed: Observed) -> None:
    observed.install("steps")
    (first, one), (_, two) = _model(), _model()
    container = Container([one, two])

    for _ in range(2):
        _backward(first)
        container.step()

    assert len(observed.events(StepEnd)) == 2


def test_optimizers_that_step_after_one_backward_are_one_step(observed: Observed) -> None:
    observed.install("steps")
    (first, one), (_, two) = _model(), _model()

    for _ in range(2):
        _backward(first)
        one.step()
        two.step()

    assert len(observed.events(StepEnd)) == 2


def test_a_gan_has_two_steps_for_two_backwards(observed: Observed) -> None:
    observed.install("steps")
    (first, one), (second, two) = _model(), _model()

    _backward(first)
    one.step()
    _backward(second)
    two.step()

    assert len(observed.events(StepEnd)) == 2


def test_a_step_that_raised_does_not_stop_the_clock(observed: Observed) -> None:
    observed.install("steps")
    model, optimizer = _model()

    def refuse() -> float:
        raise ValueError("no loss today")

    _backward(model)
    with pytest.raises(ValueError, match="no loss today"):
        optimizer.step(refuse)
    _backward(model)
    optimizer.step()

    assert len(observed.events(StepEnd)) == 1


def test_a_closure_may_run_backward_inside_the_step(observed: Observed) -> None:
    observed.install("steps")
    model, _ = _model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)

    (end,) = observed.events(StepEnd)
    assert end.num_backwards >= 1


def test_a_scaler_that_skips_still_closes_the_step(observed: Observed) -> None:
    observed.install("steps")
    model, optimizer = _model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    for value in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    assert len(observed.events(StepEnd)) == 2


def _graphs_of_a_compiled_step() -> int:
    model, optimizer = _model()
    _backward(model)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(optimizer.step, backend=backend)()
    return len(graphs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised within torch
def test_a_compiled_step_has_no_more_graph_breaks(observed: Observed) -> None:
    without = _graphs_of_a_compiled_step()

    observed.install("steps")

    assert _graphs_of_a_compiled_step() == without


def test_gradients_asked_for_by_hand_are_no_backward(observed: Observed) -> None:
    observed.install("steps")
    model, _ = _model()

    torch.autograd.grad(model(torch.ones(1, 2)).sum(), list(model.parameters()))

    assert observed.recorder.num_backwards == 0


def test_the_phase_is_backward_only_within(observed: Observed) -> None:
    observed.install("steps")
    seen: list[Phase] = []

    def look(gradient: torch.Tensor) -> None:
        seen.append(observed.recorder.phase)

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(look)
    observed.recorder.set_phase(Phase.FORWARD)
    leaf.sum().backward()

    assert seen == [Phase.BACKWARD]
    assert observed.recorder.phase is Phase.FORWARD
    assert observed.recorder.backward is None


def test_checkpointed_recomputation_is_part_of_its_backward(observed: Observed) -> None:
    observed.install("steps")
    model, _ = _model()
    leaf = torch.ones(1, 2, requires_grad=True)

    torch.utils.checkpoint.checkpoint(model, leaf, use_reentrant=True).sum().backward()

    assert observed.recorder.num_backwards == 1
