from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from distdiag.event import ProbeDisabled
from distdiag.model_event import PartialRead
from tests.probes.conftest import Observed

pytestmark = pytest.mark.usefixtures("fake_group")


def tensor(*placements: Any) -> DTensor:
    return DTensor.from_local(torch.ones(()), init_device_mesh("cpu", (2,)), list(placements))


def test_a_number_out_of_a_partial_sum_is_told_with_its_line(observed: Observed) -> None:
    observed.install("partial-reads")

    tensor(Partial()).item()

    (read,) = observed.events(PartialRead)
    assert (read.api, read.placements) == ("item", ("P(sum)",))
    assert read.site.location is not None
    assert read.site.location.file == __file__


def test_float_is_another_way_to_read(observed: Observed) -> None:
    observed.install("partial-reads")

    assert float(tensor(Partial("avg"))) == 1.0

    (read,) = observed.events(PartialRead)
    assert (read.api, read.placements) == ("float", ("P(avg)",))


def test_each_line_is_told_once(observed: Observed) -> None:
    observed.install("partial-reads")
    for _ in range(3):
        tensor(Partial()).item()
    tensor(Partial()).item()
    assert len(observed.events(PartialRead)) == 2


def test_whole_values_are_silent(observed: Observed) -> None:
    observed.install("partial-reads")
    assert tensor(Replicate()).item() == 1.0
    torch.ones(()).item()
    assert not observed.events(PartialRead)


def test_a_wrong_use_fails_as_before(observed: Observed) -> None:
    observed.install("partial-reads")
    shards = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(RuntimeError):
        shards.item()
    assert not observed.events(ProbeDisabled)


def test_the_methods_are_inherited_again_afterwards(observed: Observed) -> None:
    observed.install("partial-reads")
    observed.uninstall()
    assert not {"item", "__float__"} & vars(DTensor).keys()
