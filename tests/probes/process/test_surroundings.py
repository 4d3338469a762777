"""What a rank tells of its surroundings, and when."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distdiag.events.environment import FactKind, Surroundings
from tests.probes.conftest import Observed


def facts(event: Surroundings) -> dict[tuple[FactKind, str], str]:
    return {(fact.kind, fact.name): fact.value for fact in event.facts}


@pytest.mark.usefixtures("fake_group")
def test_they_are_told_once_as_they_are_at_the_first_collective(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed.install("collectives", "surroundings")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    dist.all_reduce(torch.ones(1))
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    dist.all_reduce(torch.ones(1))
    (event,) = observed.events(Surroundings)
    found = facts(event)
    assert found[FactKind.VARIABLE, "NCCL_ALGO"] == "Ring"
    assert found[FactKind.VERSION, "torch"] == torch.__version__
    assert found[FactKind.SETTING, "default dtype"] == "float32"


def test_a_program_without_collectives_tells_them_at_its_end(observed: Observed) -> None:
    observed.install("surroundings")
    assert not observed.events(Surroundings)
    for probe in observed.probes:
        probe.flush()
    (event,) = observed.events(Surroundings)
    assert facts(event)[FactKind.SEED, "torch"] == str(torch.initial_seed())
