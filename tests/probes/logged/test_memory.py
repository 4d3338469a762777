"""What a process holds, and which graphs of earlier losses are still alive."""

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.logged import MemoryUse
from distdiag.probes.logged.memory import EVERY, held_bytes
from tests.probes.conftest import Observed

MIB = 1 << 20


@pytest.fixture(autouse=True)
def installed(observed: Observed) -> Iterator[None]:
    observed.install("steps", "step-memory")
    yield
    assert not observed.events(ProbeDisabled)


def graphs(observed: Observed, keep: Callable[[torch.Tensor], object]) -> list[int]:
    """The numbers of graphs that are alive after each of 20 looked-at steps."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20 * EVERY):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        keep(loss)
    return [event.num_graphs for event in observed.events(MemoryUse)]


def test_graphs_that_are_kept_are_counted(observed: Observed) -> None:
    kept: list[torch.Tensor] = []
    numbers = graphs(observed, kept.append)
    assert numbers == sorted(numbers) and numbers[-1] >= 19


def test_a_sum_of_losses_keeps_their_graphs(observed: Observed) -> None:
    total = [torch.zeros(())]
    assert graphs(observed, lambda loss: total.append(total.pop() + loss))[-1] >= 19


def test_numbers_keep_no_graph(observed: Observed) -> None:
    kept: list[torch.Tensor] = []
    assert max(graphs(observed, lambda loss: kept.append(loss.detach()))) <= 2


def test_pages_of_files_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(64 * MIB))
    before = held_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert not any(pages[::4096])
        assert held_bytes().used - before.used < 16 * MIB


def test_what_was_asked_for_counts_as_used_once_it_is_filled() -> None:
    before = held_bytes()
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        asked = held_bytes()
        room[::4096] = bytes(64 * MIB // 4096)
        filled = held_bytes()
    assert asked.reserved - before.reserved >= 60 * MIB > asked.used - before.used
    assert filled.used - before.used >= 60 * MIB
