from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import SliceSaved
from distdiag.probes.models.snapshot import slices_in
from tests.probes.conftest import Observed
from tests.probes.sample_models import fsdp2


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4))


def parts(sharded: nn.Module) -> dict[str, torch.Tensor]:
    """What a program saves that forgets to gather."""
    return {name: p.to_local() for name, p in sharded.named_parameters()}


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_local_parts_are_recognised_wherever_they_are_put(fake_group: None) -> None:
    sharded = fsdp2(model())
    saved = {"model": [parts(sharded), {"step": 3, "loss": torch.ones(1)}]}

    names, members = slices_in(saved, [sharded])

    assert names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert members == (0, 1)


def test_only_what_is_saved_is_named(fake_group: None) -> None:
    sharded = fsdp2(model())
    assert slices_in([sharded[1].bias.to_local()], [sharded]) == (("1.bias",), (0, 1))


def test_shards_and_whole_tensors_are_no_slices(fake_group: None) -> None:
    sharded, plain = fsdp2(model()), model()
    saved = {**sharded.state_dict(), "plain": plain.state_dict(), "full": torch.ones(2, 2)}
    assert slices_in(saved, [sharded, plain]) == ((), ())


def test_a_whole_tensor_that_lies_at_the_same_place_is_no_slice(fake_group: None) -> None:
    sharded = fsdp2(model())
    one = sharded[0].weight.to_local()[:1]
    assert slices_in([one], [sharded]) == ((), ())


def test_copies_of_a_part_need_not_be_saved(four_ranks: None) -> None:
    hybrid = model()
    fully_shard(hybrid, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard")))
    assert slices_in(parts(hybrid), [hybrid])[1] == (0, 1)


def test_a_save_is_reported_with_its_line(
    observed: Observed, fake_group: None, folder: Path
) -> None:
    observed.install("save", "steps")
    sharded = fsdp2(model())

    torch.save(parts(sharded), folder / "model.pt")

    (event,) = observed.events(SliceSaved)
    assert (len(event.names), event.members) == (4, (0, 1))
    assert event.site.location is not None
    assert event.site.location.file == __file__
    assert set(torch.load(folder / "model.pt")) == set(event.names)


def test_other_saves_are_silent(observed: Observed, fake_group: None, folder: Path) -> None:
    observed.install("save", "steps")
    fsdp2(model())

    torch.save(obj={"step": 1}, f=folder / "step.pt")
    torch.save(model().state_dict(), folder / "model.pt")

    assert not observed.events(SliceSaved)
    assert not observed.events(ProbeDisabled)


def test_a_save_without_arguments_fails_as_before(observed: Observed, fake_group: None) -> None:
    observed.install("save", "steps")
    with pytest.raises(TypeError):
        torch.save()
    assert not observed.events(ProbeDisabled)
