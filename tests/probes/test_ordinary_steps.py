"""What the agent does in a step that nobody looks at closely: counted, for times vary."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import distdiag
from distdiag.config.numerics import NumericsConfig
from distdiag.probes import out_of_sight
from tests.probes.conftest import Observed

OWN = str(Path(distdiag.__file__).parent)
NUM_FIRST = 9
"""The first steps of a model are looked at, and those of powers of two."""
LATER = 301
"""The first steps of a run are looked at, and those of multiples of 8, 16 and 100."""

Profile = Literal["light", "standard"]


class Block(nn.Module):
    """A layer with the modules that those of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return x + self.out(attended.reshape(2, 4, 8))


@contextmanager
def _counting(calls: Counter[str]) -> Iterator[None]:
    """Count how often functions of distdiag are called."""

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            calls[f"{frame.f_code.co_filename.removeprefix(OWN)} {frame.f_code.co_qualname}"] += 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(out_of_sight, "_profile", lambda: None)  # hide nothing from this one
        sys.setprofile(see)
        try:
            yield
        finally:
            sys.setprofile(None)


def _own_frames(observed: Observed, num_layers: int) -> Counter[str]:
    """Train, and return how often functions of distdiag were called in one ordinary step."""
    layers = [Block() for _ in range(num_layers)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(torch.utils.data.DataLoader([torch.ones(4, 8)] * 64, batch_size=2))
    calls: Counter[str] = Counter()

    def step() -> None:
        loss = model(next(batches)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(NUM_FIRST + 2):
        if number == NUM_FIRST:
            observed.recorder.step = LATER
        with _counting(calls if number > NUM_FIRST else Counter()):
            step()  # always from the same line: a new call site is written down
    return calls


def _settled(profile: Profile) -> dict[str, object]:
    """Return a configuration by which nothing is read beyond what each step is read for."""
    return {"profile": profile, "numerics": NumericsConfig(cost_share=0.0)}


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize(("profile", "most"), [("light", 450), ("standard", 650)])
def test_an_ordinary_step_calls_few_functions(
    observed: Observed, profile: Profile, most: int
) -> None:
    observed.install(**_settled(profile))
    calls = _own_frames(observed, num_layers=4)
    assert 0 < calls.total() <= most, calls.most_common()


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize(("profile", "for_attention"), [("light", 1), ("standard", 2)])
def test_a_layer_adds_the_call_of_its_attention_only(
    observed: Observed, profile: Profile, for_attention: int
) -> None:
    observed.install(**_settled(profile))
    few = _own_frames(observed, num_layers=2)
    many = _own_frames(observed, num_layers=8)
    for_model = 5  # the first one may still be known of
    assert (many - few).total() <= 6 * for_attention + for_model, many - few


@pytest.mark.usefixtures("lone_group")
def test_a_collective_calls_few_functions(observed: Observed) -> None:
    observed.install()
    tensor, calls = torch.ones(4), Counter[str]()
    observed.recorder.step = LATER
    observed.signals.step_ended.emit()
    for is_seen in (False, True):
        with _counting(calls if is_seen else Counter()):
            dist.all_reduce(tensor)
    assert 0 < calls.total() <= 50, calls.most_common()
