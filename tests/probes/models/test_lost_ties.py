"""Which calls part a parameter that was one under two names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distdiag.probes.base import Patches
from distdiag.probes.models.lost_ties import LostTies, Untied
from distdiag.probes.models.wrappers import walk


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def ties():
    patches, ties, failures = Patches(), LostTies(), []
    ties.watch(patches, failures.append)
    yield ties
    patches.undo()
    assert failures == []


def parted(ties, model):
    return [untied for _, untied in ties.pairs(list(walk(model)))]


def copies(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_what_a_move_from_meta_parts_is_reported(ties):
    with torch.device("meta"):
        model = Tied()
    model.to_empty(device="cpu")
    assert parted(ties, model) == [Untied("embed.weight", "to_empty")]


def test_what_is_assigned_is_reported(ties):
    model = Tied()
    model.load_state_dict(copies(model), assign=True)
    assert parted(ties, model) == [Untied("embed.weight", "load_state_dict")]


def test_what_is_tied_again_or_frozen_or_resized_is_not(ties):
    models = [Tied().to("meta").to_empty(device="cpu") for _ in range(3)]
    models[0].head.weight = models[0].embed.weight
    models[1].head.weight.requires_grad_(requires_grad=False)
    models[2].head.weight = nn.Parameter(torch.zeros(6, 4))
    assert [parted(ties, model) for model in models] == [[], [], []]


def test_calls_that_keep_the_tie_are_not(ties):
    model = Tied()
    model.load_state_dict(copies(model))
    model.to(torch.float64)
    model.to_empty(device="cpu")
    assert parted(ties, model) == []


def test_what_the_program_parts_itself_is_not(ties):
    model = Tied().to("cpu")
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    assert parted(ties, model) == []


def test_what_a_function_parts_in_between_is_reported(ties):
    models = [Tied(), Tied()]
    ties.begin(models[0])
    for model in models:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        ties.end(model, "parallelize_module")
    assert parted(ties, models[0]) == [Untied("embed.weight", "parallelize_module")]
    assert parted(ties, models[1]) == []
