from __future__ import annotations

import copy
import gc
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from distdiag.probes.base import Patches
from distdiag.probes.models.registry import ObjectRegistry, roots_of


class Watched:
    """A class whose living objects are watched, and the failures that were reported."""

    def __init__(self, kind: type, *ways: str) -> None:
        self.failures: list[Exception] = []
        self.patches = Patches()
        self.born = ObjectRegistry(kind, ways)
        self.born.watch(self.patches, self.failures.append)

    @property
    def roots(self) -> list[nn.Module]:
        return list(roots_of(self.born.alive()))


@pytest.fixture
def modules() -> Iterator[Watched]:
    gc.collect()
    watched = Watched(nn.Module, "__init__", "__setstate__")
    yield watched
    watched.patches.undo()
    assert not watched.failures


@pytest.fixture
def optimizers() -> Iterator[Watched]:
    watched = Watched(torch.optim.Optimizer, "_patch_step_function")
    yield watched
    watched.patches.undo()
    assert not watched.failures


def test_living_modules_are_known_in_the_order_in_which_they_were_made(modules: Watched) -> None:
    first, second = nn.Linear(2, 2), nn.LayerNorm(2)

    assert modules.born.alive() == [first, second]
    assert modules.born.count == 2


def test_a_copy_is_known(modules: Watched) -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    twin = copy.deepcopy(model)

    assert modules.roots == [model, twin]


def test_an_unpickled_module_is_known(modules: Watched) -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    loaded = pickle.loads(pickle.dumps(model))

    assert modules.roots == [model, loaded]


def test_garbage_is_forgotten(modules: Watched) -> None:
    kept, gone = nn.Linear(2, 2), nn.Linear(2, 2)

    del gone
    gc.collect()

    assert modules.born.alive() == [kept]
    assert modules.born.count == 2


def test_a_module_whose_constructor_runs_twice_is_known_once(modules: Watched) -> None:
    model = nn.Linear(2, 2)

    nn.Module.__init__(model)

    assert modules.born.alive() == [model]


def test_a_module_that_is_a_part_is_no_root(modules: Watched) -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(nn.ModuleList([inner]), nn.ReLU())

    assert modules.roots == [outer]


def test_modules_in_a_plain_list_are_roots_of_their_own(modules: Watched) -> None:
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model = nn.Linear(2, 2)
    model.__dict__["parts"] = parts

    assert modules.roots == [*parts, model]


def test_modules_without_tensors_are_no_roots(modules: Watched) -> None:
    loss, norm = nn.MSELoss(), nn.BatchNorm1d(2, affine=False)

    assert loss in modules.born.alive()
    assert modules.roots == [norm]


def test_a_model_is_a_root_again_when_what_held_it_is_gone(modules: Watched) -> None:
    model = nn.Linear(2, 2)
    outer = nn.Sequential(model)
    assert modules.roots == [outer]

    del outer
    gc.collect()

    assert modules.roots == [model]


def test_optimizers_and_their_copies_are_known(optimizers: Watched) -> None:
    first = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    twin = copy.deepcopy(first)

    assert optimizers.born.alive() == [first, twin]


def test_watching_leaves_modules_as_they_are(modules: Watched) -> None:
    watched = nn.Linear(2, 2)
    signature = inspect.signature(nn.Module.__init__)
    modules.patches.undo()

    assert watched.__dict__.keys() == nn.Linear(2, 2).__dict__.keys()
    assert signature == inspect.signature(nn.Module.__init__)


def test_a_constructor_that_raises_still_raises(modules: Watched) -> None:
    with pytest.raises(TypeError):
        nn.Module.__init__()
    with pytest.raises(TypeError):
        nn.Module(1, 2)
    assert modules.born.alive() == []


def test_a_failure_is_reported_and_does_not_reach_the_user() -> None:
    class Slotted:
        __slots__ = ()  # no weak reference to it can be made

        def __init__(self) -> None:
            pass

    watched = Watched(Slotted, "__init__")

    assert isinstance(Slotted(), Slotted)
    assert [type(error) for error in watched.failures] == [TypeError]


def test_what_was_replaced_is_put_back() -> None:
    before = {name: vars(nn.Module)[name] for name in ("__init__", "__setstate__")}
    watched = Watched(nn.Module, *before)
    assert all(vars(nn.Module)[name] is not before[name] for name in before)

    watched.patches.undo()

    assert all(vars(nn.Module)[name] is before[name] for name in before)


def test_a_way_that_torch_does_not_have_is_left_out() -> None:
    watched = Watched(nn.Module, "__init__", "no_such_method")

    model = nn.Linear(2, 2)
    watched.patches.undo()

    assert watched.born.alive() == [model]
    assert not hasattr(nn.Module, "no_such_method")


COMPILED = """
import torch
from torch import nn

from distdiag.probes.base import Patches
from distdiag.probes.models.registry import LiveModels

LiveModels().watch(Patches(), print)

@torch.compile(backend="eager", fullgraph=True)
def loss(values):
    return nn.SmoothL1Loss()(values, torch.zeros(2))

print(loss(torch.ones(2)).item())
"""


def test_a_module_made_in_a_compiled_function_stays_in_its_graph(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPILED)

    # In a process of its own: what counts is who comes first, the watch or Dynamo.
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)

    assert done.stdout == "0.5\n", done.stderr
