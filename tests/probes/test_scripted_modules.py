"""Models that TorchScript keeps, wholly or in part: no probe is switched off by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distdiag.events.lifecycle import ProbeDisabled, StepEnd, Unobserved
from distdiag.events.models import ModelPlan
from distdiag.events.routing import Routing
from tests.probes.conftest import Observed
from tests.probes.sample_models import ddp

pytestmark = [
    pytest.mark.usefixtures("fake_group"),
    pytest.mark.filterwarnings("ignore"),  # TorchScript is deprecated, and tracing warns
]


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.gate(tokens), -1).topk(2, -1)
        parts = torch.stack([expert(tokens) for expert in self.experts], 1)
        picked = parts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        return (picked * weights.unsqueeze(-1)).sum(1)


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def script(module: nn.Module) -> nn.Module:
    scripted: nn.Module = torch.jit.script(module)
    return scripted


def trace(module: nn.Module) -> nn.Module:
    traced: nn.Module = torch.jit.trace(module, torch.zeros(2, 4))
    return traced


def frozen() -> nn.Module:
    made: nn.Module = torch.jit.freeze(script(norm().eval()))
    return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "part scripted": lambda: nn.Sequential(script(norm()), Router()),
    "part traced": lambda: nn.Sequential(trace(norm()), Router()),
    "part frozen": lambda: nn.Sequential(frozen(), Router()),
    "router scripted": lambda: nn.Sequential(norm(), script(Router())),
    "whole scripted": lambda: script(nn.Sequential(norm(), Router())),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["DDP", "bare"])
def test_all_probes_go_on(name: str, is_wrapped: bool, observed: Observed, tmp_path: Path) -> None:
    observed.install()
    model = MODELS[name]()
    aside = script(nn.Linear(2, 2))
    whole = ddp(model) if is_wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for _ in range(2):
        whole(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    model.load_state_dict(torch.load(tmp_path / "state.pt"))
    whole(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    for probe in observed.probes:
        probe.flush()

    assert observed.events(ProbeDisabled) == []
    assert len(observed.events(StepEnd)) == 3
    names = {t.name for plan in observed.events(ModelPlan) for t in plan.tensors}
    assert any(each.endswith("gate.weight") for each in names)
    missed = [each.what for each in observed.events(Unobserved)]
    is_scripted = "router" in name or "whole" in name
    assert bool(observed.events(Routing)) is not is_scripted
    assert bool(missed) is is_scripted
    assert aside is not None
