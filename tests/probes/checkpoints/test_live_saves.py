"""What is saved while another thread changes it."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distdiag.events.checkpoints import ChangedWhileSaved
from tests.probes.conftest import Observed


class Upload(io.BytesIO):
    """Waits in the middle of what it is given until somebody has taken a step."""

    def __init__(self, reached: threading.Event, stepped: threading.Event) -> None:
        super().__init__()
        self.reached, self.stepped = reached, stepped

    def write(self, data: Any) -> int:
        self.reached.set()
        self.stepped.wait(20)
        return super().write(data)


def _save_in_the_background(
    observed: Observed, of: Callable[[dict[str, Any]], Any]
) -> list[ChangedWhileSaved]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    observed.install("live-saves")
    reached, stepped = threading.Event(), threading.Event()
    state = of({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    thread = threading.Thread(target=torch.save, args=(state, Upload(reached, stepped)))
    thread.start()
    assert reached.wait(20)
    optimizer.step()
    stepped.set()
    thread.join()
    return [event for event in observed.events() if isinstance(event, ChangedWhileSaved)]


def test_a_step_during_a_save_changes_what_is_saved(observed: Observed) -> None:
    (event,) = _save_in_the_background(observed, lambda state: state)

    assert (event.num_changed, event.num_saved) == (8, 8)
    assert event.names[0] == "model.weight"


@pytest.mark.parametrize(
    "of",
    [copy.deepcopy, lambda state: {"model": {k: v.clone() for k, v in state["model"].items()}}],
)
def test_copies_do_not_change(observed: Observed, of: Callable[[dict[str, Any]], Any]) -> None:
    assert not _save_in_the_background(observed, of)


def test_what_cannot_be_walked_is_saved(observed: Observed) -> None:
    observed.install("live-saves")
    with torch.inference_mode():
        state: dict[str, Any] = {"frozen": torch.ones(2)}
    state["self"] = state
    torch.save(state, io.BytesIO())

    assert observed.events() is not None
