"""What counts as a step, a pass, its gradients and its random numbers, in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from distdiag.config.tasks import ParityTask
from distdiag.parity.recorded_run import RecordedRun
from distdiag.probes.parity.recorder import ParityRecorder
from distdiag.record.marks import set_hook
from distdiag.record.recording import Kind
from tests.probes.conftest import Observed

ROWS = torch.arange(24.0).view(6, 4).split(1)
Loop = Callable[[], None]


@pytest.fixture
def recorded(observed: Observed, tmp_path: Path) -> Iterator[Callable[[Loop], RecordedRun]]:
    """Run a loop and return what was recorded of it."""

    def recorded(loop: Loop) -> RecordedRun:
        probe = ParityRecorder(observed.recorder, ParityTask(folder=str(tmp_path), num_steps=99))
        probe.install()
        try:
            loop()
        finally:
            probe.flush()
            probe.uninstall()
        return RecordedRun(tmp_path, "1 rank")

    yield recorded
    set_hook(lambda batch: batch)


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def loader() -> DataLoader[torch.Tensor]:
    return DataLoader([each[0] for each in ROWS], batch_size=2)


def test_gradients_that_a_function_returns_are_those_of_a_pass(recorded) -> None:
    def loop() -> None:
        net = nn.Linear(4, 1)
        for x in loader():
            found = torch.autograd.grad(net(x).sum(), list(net.parameters()))
            for parameter, gradient in zip(net.parameters(), found, strict=True):
                parameter.grad = gradient
            sgd(net).step()

    run = recorded(loop)
    assert (run.num_steps, run.num_micro(0)) == (3, 1)
    assert run.whole(Kind.GRADIENT, 0, "Linear/bias").tolist() == [2.0]


@pytest.mark.parametrize("what", ["inputs", "a part", "derived again"])
def test_other_gradients_are_none(recorded, what: str) -> None:
    def loop() -> None:
        net = nn.Linear(4, 1)
        optimizer = sgd(net)
        for x in loader():
            loss = net(x.requires_grad_()).square().sum()
            inputs = {"inputs": [x], "a part": [net.bias], "derived again": [*net.parameters()]}
            again = what == "derived again"
            torch.autograd.grad(loss, inputs[what], retain_graph=True, create_graph=again)
            loss.backward()
            optimizer.step()

    run = recorded(loop)
    assert [run.num_micro(step) for step in range(run.num_steps)] == [1, 1, 1]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_gradients_are_those_of_the_first_call_of_a_closure(recorded, kind) -> None:
    seen = []

    def loop() -> None:
        net = nn.Linear(4, 1)
        optimizer = kind(net.parameters(), lr=0.01)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(ROWS[0]).square().sum()
            loss.backward()
            seen.append(net.bias.grad.tolist())
            return loss

        optimizer.step(closure)
        optimizer.step(closure=closure)

    run = recorded(loop)
    assert run.whole(Kind.GRADIENT, 0, "Linear/bias").tolist() == seen[0]
    second = seen[len(seen) // 2] if kind is torch.optim.SGD else None
    assert second in (None, run.whole(Kind.GRADIENT, 1, "Linear/bias").tolist())


@pytest.mark.parametrize("noise", [False, True])
def test_weights_that_are_made_after_a_batch_are_no_noise(recorded, noise: bool) -> None:
    def loop() -> None:
        batches = list(loader())
        net = nn.Linear(4, 1)
        optimizer = sgd(net)
        for x in batches:
            net(x + torch.rand_like(x) if noise else x).sum().backward()
            optimizer.step()

    assert recorded(loop).summaries[0].draws_in_forward is noise


def test_a_batch_that_a_thread_fetches_ends_no_step(recorded) -> None:
    def loop() -> None:
        net = nn.Linear(4, 1)
        optimizer, batches = sgd(net), iter(loader())
        net(next(batches)).sum().backward()
        optimizer.step()
        thread = threading.Thread(target=next, args=(batches,))
        thread.start()
        thread.join()
        net.bias.data.fill_(7.0)  # such as what a program does to keep weights within bounds

    run = recorded(loop)
    assert run.num_steps == 1
    assert run.whole(Kind.PARAMETER, 0, "Linear/bias").tolist() == [7.0]
