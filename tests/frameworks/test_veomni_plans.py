from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import PatternMatches, PlanFault, PlanPatterns, PlanSource
from tests.probes.conftest import Observed

STAND_INS = Path(__file__).parents[1] / "integration" / "stand_ins"

pytestmark = pytest.mark.usefixtures("fake_group")


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(STAND_INS))
    import veomni.distributed.parallel_plan as module  # type: ignore[import-not-found]

    yield module
    for name in [name for name in sys.modules if name.startswith("veomni")]:
        del sys.modules[name]


def model(num_experts: int = 4) -> nn.Module:
    experts = nn.ParameterDict(
        {name: nn.Parameter(nn.Linear(8, num_experts).weight) for name in ("up", "down")}
    )
    return nn.ModuleDict({"experts": experts, "gate": nn.Linear(2, 2)})


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep_fsdp", "ep"))


def reported(observed: Observed) -> list[PatternMatches]:
    (event,) = observed.events(PlanPatterns)
    assert (event.source, event.model) == (PlanSource.VEOMNI, "ModuleDict")
    return list(event.patterns)


def apply(plans: ModuleType, patterns: dict[str, Any], **options: Any) -> None:
    plans.ParallelPlan({"ep": patterns}).apply(model(**options), {"ep": mesh()})


def test_each_pattern_is_reported_with_what_it_matches(
    observed: Observed, plans: ModuleType
) -> None:
    observed.install("veomni-plans")
    apply(plans, {"experts.*": Shard(0), "model.experts.up": Shard(0)})
    first, second = reported(observed)
    assert (first.num_matches, first.wanted, first.faults) == (2, "Shard(0) over ep", ())
    assert (second.num_matches, second.closest) == (0, "experts.up")


def test_an_axis_that_the_job_does_not_have_is_silent(
    observed: Observed, plans: ModuleType
) -> None:
    observed.install("veomni-plans")
    plans.ParallelPlan({"ep": {"gone": Shard(0)}}).apply(model(), {"ep": None})
    assert not observed.events(PlanPatterns)


def test_a_second_pattern_that_says_something_else_clashes(
    observed: Observed, plans: ModuleType
) -> None:
    observed.install("veomni-plans")
    apply(plans, {"experts.*": Shard(0), "*.up": Shard(1), "*.down": Shard(0)})
    _, up, down = reported(observed)
    assert [(fault.fault, fault.name) for fault in up.faults] == [(PlanFault.CLASH, "experts.up")]
    assert down.faults == ()


def test_experts_that_cannot_be_divided_are_reported_before_the_plan_fails(
    observed: Observed, plans: ModuleType
) -> None:
    observed.install("veomni-plans")
    with pytest.raises(AssertionError):
        apply(plans, {"experts.up": Shard(0)}, num_experts=3)
    (fault,) = reported(observed)[0].faults
    assert (fault.fault, fault.text) == (PlanFault.UNEVEN, "3 is no multiple of ep=2")


def test_a_parameter_that_is_not_split_is_reported(
    observed: Observed, plans: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans.ParallelPlan, "apply", lambda self, model, meshes: None)
    observed.install("veomni-plans")
    apply(plans, {"experts.up": Shard(0)})
    (fault,) = reported(observed)[0].faults
    assert (fault.fault, fault.name) == (PlanFault.UNLIKE, "experts.up")


def test_a_plan_of_an_older_version_is_read_too(
    observed: Observed, plans: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older(plans.ParallelPlan):  # type: ignore[misc, name-defined]
        def __init__(self, ep_plan: dict[str, Any]) -> None:
            super().__init__({})
            self.ep_plan = ep_plan

    observed.install("veomni-plans")
    Older({"gone": Shard(0)}).apply(model(), mesh())
    assert [(each.pattern, each.num_matches) for each in reported(observed)] == [("gone", 0)]


def test_a_module_without_such_plans_is_left_alone(
    observed: Observed, plans: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(plans, "ParallelPlan")
    observed.install("veomni-plans")
    assert not observed.events(ProbeDisabled)
