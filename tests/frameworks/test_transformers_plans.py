from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import PlanFault, PlanPatterns, PlanSource
from tests.probes.conftest import Observed

modeling = pytest.importorskip("transformers.modeling_utils")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 3, 2
        self.q_proj = nn.Linear(6, 6)


class Model(nn.Module):
    """Stands in for one that was loaded; `from_pretrained` of the library is not needed."""

    def __init__(self, plan: dict[str, str], size: int | None, mesh: object = "mesh") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self._tp_plan, self._tp_size, self._device_mesh = plan, size, mesh


@pytest.fixture
def load(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a model as `from_pretrained` would return it."""

    def from_pretrained(cls: type, made: object) -> object:
        return made

    monkeypatch.setattr(modeling.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    observed.install("transformers-plans")
    return modeling.PreTrainedModel.from_pretrained


PLAN = {"layers.*.q_proj": "colwise", "layers.*.router": "colwise", "layers.*.q_proj.bias": "rep"}


def test_the_plan_of_a_sharded_model_is_reported(observed: Observed, load: Any) -> None:
    made = Model(PLAN, 2)
    assert load(made) is made
    (event,) = observed.events(PlanPatterns)
    assert (event.source, event.model) == (PlanSource.TRANSFORMERS, "Model")
    assert [(p.pattern, p.wanted, p.num_matches) for p in event.patterns] == [
        ("layers.*.q_proj", "colwise", 2),
        ("layers.*.router", "colwise", 0),
        ("layers.*.q_proj.bias", "rep", 2),
    ]
    (fault, _) = event.patterns[0].faults
    assert (fault.fault, fault.name) == (PlanFault.UNEVEN, "layers.0.q_proj")


def test_a_model_that_comes_with_information_is_reported_too(observed: Observed, load: Any) -> None:
    load((Model(PLAN, 2), {}))
    assert len(observed.events(PlanPatterns)) == 1


@pytest.mark.parametrize("made", [Model(PLAN, None), Model(PLAN, 1), Model(PLAN, 2, None), None])
def test_models_that_are_not_sharded_are_silent(observed: Observed, load: Any, made: Any) -> None:
    assert load(made) is made
    assert not observed.events(PlanPatterns)
    assert not observed.events(ProbeDisabled)
