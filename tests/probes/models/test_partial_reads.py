from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import PartialRead
from tests.probes.conftest import Observed

pytestmark = pytest.mark.usefixtures("fake_group")


def tensor(*placements: Any) -> DTensor:
    return DTensor.from_local(torch.ones(()), init_device_mesh("cpu", (2,)), list(placements))


def end_step(observed: Observed) -> None:
    observed.signals.step_ended.emit()


def test_a_number_out_of_a_partial_sum_is_reported_with_its_line(observed: Observed) -> None:
    observed.install("partial-reads")

    tensor(Partial()).item()
    end_step(observed)

    (read,) = observed.events(PartialRead)
    assert (read.api, read.placements) == ("item", ("P(sum)",))
    assert read.site.location is not None
    assert read.site.location.file == __file__


def test_float_is_another_way_to_read(observed: Observed) -> None:
    observed.install("partial-reads")

    assert float(tensor(Partial("avg"))) == 1.0
    end_step(observed)

    (read,) = observed.events(PartialRead)
    assert (read.api, read.placements) == ("float", ("P(avg)",))


def test_each_line_is_reported_once(observed: Observed) -> None:
    observed.install("partial-reads")
    for _ in range(3):
        tensor(Partial()).item()
        end_step(observed)
    tensor(Partial()).item()
    end_step(observed)
    assert len(observed.events(PartialRead)) == 2


def test_a_line_is_reported_at_the_end_of_the_step(observed: Observed) -> None:
    observed.install("partial-reads", "steps")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()

    tensor(Partial()).item()
    assert not observed.events(PartialRead)
    optimizer.step()

    assert len(observed.events(PartialRead)) == 1


def test_a_program_without_steps_is_reported_in_the_end(observed: Observed) -> None:
    (probe,) = observed.install("partial-reads")
    tensor(Partial()).item()
    probe.flush()
    assert len(observed.events(PartialRead)) == 1


def test_a_number_that_the_program_reduces_itself_is_not_reported(observed: Observed) -> None:
    observed.install("partial-reads", "collectives", "steps")

    number = torch.tensor(tensor(Partial()).item())
    dist.all_reduce(number)
    end_step(observed)
    assert not observed.events(PartialRead)

    tensor(Partial()).item()
    dist.all_gather([torch.ones(()), torch.ones(())], number)
    end_step(observed)
    assert len(observed.events(PartialRead)) == 1


def test_whole_values_are_silent(observed: Observed) -> None:
    observed.install("partial-reads")
    assert tensor(Replicate()).item() == 1.0
    torch.ones(()).item()
    end_step(observed)
    assert not observed.events(PartialRead)


def test_a_wrong_use_fails_as_before(observed: Observed) -> None:
    observed.install("partial-reads")
    shards = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(RuntimeError):
        shards.item()
    end_step(observed)
    assert not observed.events(ProbeDisabled)


def test_the_methods_are_inherited_again_afterwards(observed: Observed) -> None:
    observed.install("partial-reads")
    observed.uninstall()
    assert not {"item", "__float__"} & vars(DTensor).keys()
