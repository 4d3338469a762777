from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import parallel as tp

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import PatternMatches, PlanFault, PlanPatterns, PlanSource
from tests.probes.conftest import Observed

pytestmark = pytest.mark.usefixtures("fake_group")


class Attention(nn.Module):
    def __init__(self, num_heads: int = 4, head_dim: int | None = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        if head_dim is not None:
            self.head_dim = head_dim
        width = num_heads * (head_dim or 2)
        self.wq = nn.Linear(width, width)
        self.wo = nn.Linear(width, width)


def model(**options: Any) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(Attention(**options) for _ in range(2))})


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def reported(observed: Observed) -> list[PatternMatches]:
    """The patterns of the only event."""
    (event,) = observed.events(PlanPatterns)
    return list(event.patterns)


def end_step(observed: Observed) -> None:
    observed.signals.step_ended.emit()


def test_each_pattern_is_reported_with_what_it_matches(observed: Observed) -> None:
    observed.install("parallelize-plans")
    plan = {"layers.*.wq": tp.ColwiseParallel(), "layers.1.wo": tp.RowwiseParallel()}

    tp.parallelize_module(model(), mesh(), plan)

    (event,) = observed.events(PlanPatterns)
    assert (event.source, event.model) == (PlanSource.PARALLELIZE_MODULE, "ModuleDict")
    assert event.site.location is not None
    assert event.site.location.file == __file__
    assert [(each.pattern, each.num_matches, each.matches) for each in event.patterns] == [
        ("layers.*.wq", 2, ("layers.0.wq", "layers.1.wq")),
        ("layers.1.wo", 1, ("layers.1.wo",)),
    ]
    assert event.patterns[0].wanted == "ColwiseParallel"


def test_a_pattern_without_a_match_is_reported_with_what_is_there(observed: Observed) -> None:
    observed.install("parallelize-plans")
    with pytest.warns(UserWarning):
        tp.parallelize_module(model(), mesh(), {"layers.*.wk": tp.ColwiseParallel()})
    (pattern,) = reported(observed)
    assert pattern.num_matches == 0
    assert pattern.closest in ("layers.*.wq", "layers.*.wo")


def test_the_same_plan_for_many_parts_is_reported_once(observed: Observed) -> None:
    observed.install("parallelize-plans")
    for layer in model()["layers"]:  # type: ignore[index]
        tp.parallelize_module(layer, mesh(), {"wq": tp.ColwiseParallel()})
    assert len(observed.events(PlanPatterns)) == 1


def test_one_style_for_a_module_is_no_plan(observed: Observed) -> None:
    observed.install("parallelize-plans")
    tp.parallelize_module(nn.Linear(4, 4), mesh(), tp.ColwiseParallel())
    tp.parallelize_module(
        module=nn.Linear(4, 4), device_mesh=mesh(), parallelize_plan={"": tp.ColwiseParallel()}
    )
    (pattern,) = reported(observed)
    assert (pattern.pattern, pattern.num_matches) == ("", 1)


def test_a_wrong_use_fails_as_before(observed: Observed) -> None:
    observed.install("parallelize-plans")
    with pytest.raises(TypeError):
        tp.parallelize_module(nn.Linear(4, 4), mesh(), 7)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        tp.parallelize_module(nn.Sequential(nn.Tanh()), mesh(), {"0": tp.ColwiseParallel()})
    assert not observed.events(ProbeDisabled)
    assert len(observed.events(PlanPatterns)) == 1


@pytest.mark.parametrize("head_dim", [2, None])
def test_heads_that_are_cut_are_reported(observed: Observed, head_dim: int | None) -> None:
    observed.install("parallelize-plans")
    plan = {"layers.*.wq": tp.ColwiseParallel()}
    tp.parallelize_module(model(num_heads=3, head_dim=head_dim), mesh(), plan)
    faults = reported(observed)[0].faults
    assert [(fault.fault, fault.name) for fault in faults] == [
        (PlanFault.UNEVEN, "layers.0.wq"),
        (PlanFault.UNEVEN, "layers.1.wq"),
    ]
    assert faults[0].text == "3 heads of 2 cannot be split over 2 ranks"


@pytest.mark.parametrize(
    ("num_heads", "style"),
    [
        (4, tp.ColwiseParallel()),
        (3, tp.ColwiseParallel(output_layouts=Replicate())),
        (3, tp.ColwiseParallel(use_local_output=False)),
        (3, tp.RowwiseParallel()),
    ],
    ids=["even", "gathered", "DTensor", "rows"],
)
def test_heads_that_stay_whole_are_silent(
    observed: Observed, num_heads: int, style: tp.ParallelStyle
) -> None:
    observed.install("parallelize-plans")
    tp.parallelize_module(model(num_heads=num_heads), mesh(), {"layers.*.wq": style})
    assert reported(observed)[0].faults == ()


def test_what_is_whole_again_is_reported_after_the_first_step(observed: Observed) -> None:
    observed.install("parallelize-plans")
    whole = model()
    layers: Any = whole["layers"]  # type: ignore[index]
    tp.parallelize_module(whole, mesh(), {"layers.*.wq": tp.ColwiseParallel()})
    layers[0].wq.weight = nn.Parameter(torch.zeros(8, 8))
    end_step(observed)
    end_step(observed)

    _, later = observed.events(PlanPatterns)
    (fault,) = later.patterns[0].faults
    assert (fault.fault, fault.name) == (PlanFault.UNLIKE, "layers.0.wq.weight")


def test_parts_that_a_program_keeps_as_plain_ones_are_silent(observed: Observed) -> None:
    observed.install("parallelize-plans")
    whole = model()
    layers: Any = whole["layers"]  # type: ignore[index]
    tp.parallelize_module(whole, mesh(), {"layers.*.wq": tp.ColwiseParallel()})
    weight = layers[0].wq.weight
    assert isinstance(weight, DTensor)
    layers[0].wq.weight = nn.Parameter(weight.to_local())
    layers[1].wq = nn.Identity()
    end_step(observed)
    assert len(observed.events(PlanPatterns)) == 1
    assert not observed.events(ProbeDisabled)


def test_the_function_is_the_old_one_afterwards(observed: Observed) -> None:
    before = tp.parallelize_module
    observed.install("parallelize-plans")
    assert tp.parallelize_module is not before
    assert tp.parallelize_module.__name__ == before.__name__
    observed.uninstall()
    assert tp.parallelize_module is before


def test_a_failure_of_the_probe_never_reaches_the_program(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed.install("parallelize-plans")

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("distdiag.probes.models.parallelize_plans._resolve", broken)
    changed = tp.parallelize_module(model(), mesh(), {"layers.*.wq": tp.ColwiseParallel()})
    assert isinstance(changed["layers"][0].wq.weight, DTensor)
    (disabled,) = observed.events(ProbeDisabled)
    assert disabled.probe == "parallelize-plans"
