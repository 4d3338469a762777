from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distdiag.probes.models.modules import clean_name
from tests.probes.conftest import Observed


def test_gathering_and_reducing_name_the_module(observed: Observed, fake_group: None) -> None:
    observed.install("collectives", "sharding-context", "steps")
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    model(torch.ones(1, 4)).sum().backward()

    modules = {(call.signature.op, call.site.module) for call in observed.calls()}
    assert {
        ("all_gather_into_tensor", "0"),
        ("all_gather_into_tensor", "1"),
        ("reduce_scatter_tensor", "0"),
        ("reduce_scatter_tensor", "1"),
    } <= modules
    assert observed.recorder.here.context.module is None


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("module.layers.0", "layers.0"),
        ("_orig_mod.layers.0", "layers.0"),
        ("layers.0._checkpoint_wrapped_module.attention", "layers.0.attention"),
        ("_fsdp_wrapped_module", ""),
        ("submodule.modules.0", "submodule.modules.0"),
    ],
)
def test_wrappers_do_not_show_in_the_name_of_a_module(name: str, clean: str) -> None:
    assert clean_name(name) == clean
