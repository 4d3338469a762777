"""Small models, how they are trained, and what the snapshots recorded of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distdiag.events.models import ModelState, Moment, TensorPlan
from distdiag.probes.models.tensor_plans import Surroundings, plan_of
from distdiag.probes.models.wrappers import WrapTimes, walk
from tests.probes.conftest import Observed

PAIR, FOUR = (0, 1), (0, 1, 2, 3)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def ddp(model: nn.Module, **options: bool) -> DistributedDataParallel:
    """Wrap a model; its gradients stay as they are, for there is nobody else."""
    wrapped = DistributedDataParallel(model, **options)  # type: ignore[arg-type]

    def reduce(_, bucket):  # DDP refuses annotations that are text
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, reduce)
    return wrapped


def fsdp2(model: nn.Module) -> nn.Module:
    """Shard a model over two ranks."""
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def backward(model: nn.Module) -> None:
    model(torch.arange(8.0).reshape(4, 2)).square().sum().backward()


def train(model: nn.Module, num_steps: int = 1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return optimizer


def reported(observed: Observed) -> list[tuple[Moment, int]]:
    return [(state.moment, state.step) for state in observed.events(ModelState)]


def state(observed: Observed, moment: Moment, model: str | None = None) -> ModelState:
    """The only state of a model at a moment."""
    states = [s for s in observed.events(ModelState) if s.moment is moment]
    (found,) = [s for s in states if model in (None, s.model)]
    return found


def means(event: ModelState) -> list[float | None]:
    return [None if content is None else content.mean for content in event.contents]


def plans(root: nn.Module, **around: Any) -> dict[str, TensorPlan]:
    """The plan of each tensor by its name."""
    surroundings = Surroundings(
        owners=around.pop("owners", {}),
        reduced=around.pop("reduced", {}),
        sent=around.pop("sent", {}),
        is_local=around.pop("is_local", False),
        training_ranks=around.pop("training_ranks", ()),
        world=around.pop("world", PAIR),
        wrap_times=around.pop("wrap_times", WrapTimes()),
        is_cut=around.pop("is_cut", lambda _: False),
        is_routing_bias=around.pop("is_routing_bias", lambda *_: False),
    )
    assert not around
    return {held.plan.name: held.plan for held in plan_of(list(walk(root)), surroundings)}
