from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.distributed.tensor import experimental

from distdiag.events.lifecycle import ProbeDisabled
from tests.probes.conftest import Observed


@contextmanager
def context_parallel(mesh, *, buffers=None, buffer_seq_dims=None, no_restore_buffers=None):
    yield tuple(buffers or ())


@pytest.fixture
def reported() -> list[tuple[object, list[torch.Tensor]]]:
    """The meshes and buffers that were reported."""
    return []


@pytest.fixture
def cp(observed: Observed, reported, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experimental, "context_parallel", context_parallel)
    observed.signals.sequence_cut.subscribe(lambda mesh, cut: reported.append((mesh, list(cut))))
    observed.install("sequence-buffers")
    return experimental.context_parallel


def test_what_context_parallelism_cuts_is_reported_with_its_mesh(reported, cp) -> None:
    cut = torch.arange(4.0)
    with cp("mesh", buffers=[cut], buffer_seq_dims=[0]) as seen:
        assert seen == (cut,)
    ((mesh, buffers),) = reported
    assert mesh == "mesh"
    assert [each is cut for each in buffers] == [True]


def test_nothing_may_be_cut(reported, cp) -> None:
    with cp(None):
        pass
    assert reported == [(None, [])]


def test_iterators_are_left_to_torch(observed: Observed, cp) -> None:
    with cp(None, buffers=iter([torch.ones(2)])) as seen:
        assert len(seen) == 1


def test_a_failure_of_who_listens_is_his_own(observed: Observed, cp) -> None:
    observed.install("steps")
    with cp(None, buffers=[7]) as seen:  # nothing that could be kept weakly
        assert seen == (7,)
    (off,) = observed.events(ProbeDisabled)
    assert off.probe == "models"
