"""Lets Megatron run without a GPU: imported before it, this gives the CPU instead of one."""

from contextlib import nullcontext
from unittest.mock import MagicMock

import torch
from torch import Tensor

__all__ = ["finish"]


def finish() -> None:
    """Replace what Megatron itself defines for a GPU, after all of it was imported."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host


def _on_host(value: Tensor | None, as_numpy: bool = False, **_: object) -> object:
    return value.numpy() if as_numpy and isinstance(value, Tensor) else value


_STREAM = MagicMock()

torch.compiler.set_stance("force_eager")  # Megatron compiles small functions when it is imported
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.current_stream = torch.cuda.Stream = lambda *_, **__: _STREAM
torch.cuda.stream = nullcontext
torch.cuda.synchronize = lambda *_: None
Tensor.cuda = lambda self, *_, **__: self
torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
torch.cuda.manual_seed = torch.manual_seed
_ZEROS = torch.zeros
torch.zeros = lambda *sizes, device=None, **options: _ZEROS(
    *sizes, device=None if device == "cuda" else device, **options
)
