from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._random import OffsetBasedRNGTracker

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.random import RandomDraw
from tests.probes.conftest import Observed
from tests.probes.sample_models import PAIR

pytestmark = pytest.mark.usefixtures("fake_group")


def draw(placement: Placement, generator: torch.Generator | None) -> None:
    """Begin a random operation as DTensor does; there is no tracker for CPUs to end it."""
    tensor: Any = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [placement])
    tracker = object.__new__(OffsetBasedRNGTracker)
    tracker._distribute_region(tensor._spec, generator=generator)


def test_a_draw_is_reported_with_the_state_before_it_and_who_holds_copies(
    observed: Observed,
) -> None:
    observed.install("random-draws")
    generator = torch.Generator().manual_seed(3)

    draw(Replicate(), generator)
    draw(Shard(0), generator)
    generator.manual_seed(4)
    draw(Replicate(), generator)

    first, second, third = observed.events(RandomDraw)
    assert (first.members, first.replicas, first.number) == (PAIR, PAIR, 0)
    assert (second.replicas, second.digest, second.number) == ((0,), first.digest, 1)
    assert third.digest != first.digest
    assert first.site.location is not None
    assert first.site.location.file == __file__


def test_later_draws_are_reported_ever_more_rarely(observed: Observed) -> None:
    observed.install("random-draws")
    for _ in range(40):
        draw(Replicate(), torch.Generator())
    numbers = [event.number for event in observed.events(RandomDraw)]
    assert numbers == [*range(8), 8, 16, 32]


def test_a_device_whose_state_cannot_be_read_without_waiting_is_left_out(
    observed: Observed,
) -> None:
    observed.install("random-draws")
    draw(Replicate(), None)
    assert not observed.events(RandomDraw)
    assert not observed.events(ProbeDisabled)


def test_the_program_goes_on_when_the_probe_fails(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed.install("random-draws")

    def explode(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("distdiag.probes.random.draws.replicas_on_mesh", explode)
    draw(Replicate(), torch.Generator())
    (event,) = observed.events(ProbeDisabled)
    assert event.probe == "random-draws"
