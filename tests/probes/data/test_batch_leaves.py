"""Tests of the leaves of batches, of the kinds that loaders make."""

import dataclasses
from collections import OrderedDict, UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch

from distdiag.probes.data.batch_leaves import UnknownBatchError, leaves, rebuild


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Sample:
    pixels: torch.Tensor
    name: str


ONE, TWO = torch.ones(2, 3), torch.zeros(2)

BATCHES = {
    "tensor": (ONE, [""]),
    "list": ([ONE, TWO], ["0", "1"]),
    "tuple": ((ONE, TWO), ["0", "1"]),
    "dict": ({"x": ONE, "n": 3}, ["x", "n"]),
    "nested": ({"a": {"b": [ONE, (TWO, TWO)]}}, ["a/b/0", "a/b/1/0", "a/b/1/1"]),
    "named tuple": (Pair(ONE, TWO), ["0", "1"]),
    "dataclass": (Sample(ONE, "one"), ["pixels", "name"]),
    "ordered": (OrderedDict(x=ONE), ["x"]),
    "user dict": (UserDict(x=ONE), ["x"]),
    "strings": ({"text": ["a", "b"], "x": ONE}, ["text", "x"]),
    "array": ({"x": np.ones((2, 2))}, ["x"]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_every_leaf_has_a_path(name):
    batch, paths = BATCHES[name]
    assert [path for path, _ in leaves(batch)] == paths


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_rebuilt_in_its_own_kind(name):
    batch, paths = BATCHES[name]
    new = {
        path: torch.full_like(leaf, 7) if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in leaves(batch)
    }
    built = rebuild(batch, new)
    assert type(built) is type(batch)
    found = dict(leaves(built))
    assert list(found) == paths
    assert all((leaf == 7).all() for leaf in found.values() if isinstance(leaf, torch.Tensor))


def test_a_part_of_another_kind_is_named():
    with pytest.raises(UnknownBatchError, match=r"x/y is a object"):
        list(leaves({"x": {"y": object()}}))
