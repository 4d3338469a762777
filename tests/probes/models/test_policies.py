from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from distdiag.events.models import Policy
from tests.probes.sample_models import plans

MIXED = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, Policy(reshard_after_forward="True")),
        ({"mixed_precision": MIXED}, Policy("float16", "float32", "", "True")),
        ({"cpu_offload": CPUOffload(offload_params=True)}, Policy("", "", "cpu", "True")),
        (
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
            Policy(reshard_after_forward="False"),
        ),
    ],
    ids=["plain", "mixed-precision", "offload", "grad-op"],
)
@pytest.mark.filterwarnings("ignore")
def test_the_policy_of_fsdp1(fake_group: None, options: dict[str, object], policy: Policy) -> None:
    model = FullyShardedDataParallel(
        nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True, **options
    )
    assert plans(model)["weight"].policy == policy


def test_the_policy_of_ddp_and_of_nobody(fake_group: None) -> None:
    model = nn.Linear(4, 4)
    assert plans(model)["weight"].policy == Policy()
    assert plans(nn.parallel.DistributedDataParallel(model))["weight"].policy == Policy()
