from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from distdiag.events.data import RowsGathered
from tests.probes.conftest import Observed

accelerator_module = pytest.importorskip("accelerate.accelerator")
loader_module = pytest.importorskip("accelerate.data_loader")


class Sampler:
    """One that fills the last batch up."""

    even_batches = True
    drop_last = False


class Loader(loader_module.DataLoaderStateMixin):  # type: ignore[misc,name-defined]
    """A prepared loader of two ranks that is at its last batch."""

    def __init__(self, state: State) -> None:
        self.gradient_state, self.batch_sampler = state, Sampler()
        self.dataset = TensorDataset(torch.arange(18))
        self.sampler, self._drop_last = None, False

    total_batch_size = 16


class State:
    """What Accelerate knows of the loader that is in use."""

    end_of_dataloader = True
    remainder = 2

    def __init__(self) -> None:
        self.active_dataloader: Loader | None = None

    def _add_dataloader(self, loader: Loader) -> None:
        self.active_dataloader = loader

    def _remove_dataloader(self, _: Loader) -> None:
        self.active_dataloader = None


class Accelerator(accelerator_module.Accelerator):  # type: ignore[misc,name-defined]
    """One of two ranks."""

    num_processes = 2

    def __init__(self, state: State) -> None:
        self.gradient_state = state


def evaluated(
    observed: Observed, rows: torch.Tensor, *, drops: bool = False, trains: bool = False
) -> list[RowsGathered]:
    observed.install("steps", "evaluation-gathers")
    state = State()
    accelerator, loader = Accelerator(state), Loader(state)
    loader.begin()
    accelerator.gather(rows)
    if drops:
        accelerator.gather_for_metrics(rows)
    if trains:
        torch.ones(1, requires_grad=True).sum().backward()
    loader.end()
    return observed.events(RowsGathered)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_module, "gather", lambda tensor: tensor)


@pytest.mark.parametrize("drops", [False, True])
def test_rows_of_a_filled_batch_are_reported(observed: Observed, *, drops: bool) -> None:
    (reported,) = evaluated(observed, torch.arange(8), drops=drops)
    assert (reported.num_samples, reported.num_rows, reported.num_real) == (18, 16, 2)
    assert reported.tensors == ("int64 8",)
    assert reported.is_dropped_elsewhere is drops
    assert reported.site.location is not None


def test_a_number_for_each_rank_is_no_row(observed: Observed) -> None:
    assert not evaluated(observed, torch.ones(1))


def test_a_pass_that_trains_evaluates_nothing(observed: Observed) -> None:
    assert not evaluated(observed, torch.arange(8), trains=True)
