"""DeepSpeed's engine, which keeps a model, its gradients and its steps to itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from scripts.parity_matrix.models import Precision


class Engine(NamedTuple):
    """A wrapped model, and what replaces `loss.backward` and `optimizer.step`."""

    model: nn.Module
    backward: Callable[[torch.Tensor], Any]
    step: Callable[[], Any]


def engine(model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision) -> Engine:
    """Let ZeRO-2 shard gradients and optimizer state of a model."""
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", "0")  # it insists, also without a launcher
    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": precision.dtype is torch.bfloat16},
            "steps_per_print": 1_000_000,
        },
        dist_init_required=False,
    )
    return Engine(made, made.backward, made.step)
