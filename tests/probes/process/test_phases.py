from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distdiag.events.base import Phase
from distdiag.record.status_page import read_status
from tests.probes.conftest import Observed


def test_batches_are_counted_on_the_status_page(observed: Observed) -> None:
    observed.install("dataloader")

    for _ in DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=2):
        assert observed.recorder.phase is Phase.FORWARD

    assert read_status(observed.folder / "rank-0.status").num_batches == 3


def test_the_phase_is_dataloader_while_a_batch_is_fetched(observed: Observed) -> None:
    observed.install("dataloader")
    seen: list[Phase] = []

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            seen.append(observed.recorder.phase)
            return index

    list(DataLoader(Data()))

    assert seen == [Phase.DATALOADER]


def test_an_error_in_the_data_reaches_the_user(observed: Observed) -> None:
    observed.install("dataloader")

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise LookupError("no such sample")

    with pytest.raises(LookupError, match="no such sample"):
        list(DataLoader(Data()))
    assert observed.recorder.phase is not Phase.DATALOADER


def test_workers_of_a_data_loader_write_nothing(observed: Observed) -> None:
    observed.install("dataloader")

    batches = list(DataLoader(TensorDataset(torch.ones(4, 1)), num_workers=1))

    assert len(batches) == 4
    assert observed.recorder.num_batches == 4


def test_saving_and_loading_is_a_phase(observed: Observed, tmp_path: Path) -> None:
    observed.install("save")
    seen: list[Phase] = []

    class Watched:
        def __reduce__(self) -> tuple[type, tuple[()]]:
            seen.append(observed.recorder.phase)
            return (dict, ())

    torch.save(Watched(), io.BytesIO())

    assert set(seen) == {Phase.CHECKPOINT}
    assert observed.recorder.phase is not Phase.CHECKPOINT


def test_compiling_is_a_phase(observed: Observed) -> None:
    observed.install("compile")
    seen: list[Phase] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        seen.append(observed.recorder.phase)
        return graph

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))

    assert seen == [Phase.COMPILE]
    assert observed.recorder.phase is not Phase.COMPILE
