"""Changes by one unit of rounding, which show how far apart two right runs may come."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from distdiag.probes.data.batch_leaves import leaves, rebuild


def perturb_in_place(tensors: Iterable[torch.Tensor], seed: int, dtype: str = "") -> None:
    """Change each element by one unit of rounding, up or down, without the program's generators.

    The unit is that of `dtype` where it is coarser than a tensor's own.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                # Through `data`, a graph that was built already does not mind.
                tensor.data.mul_(_factors(tensor, generator, dtype))


def perturbed(batch: object, seed: int, dtype: str = "") -> object:
    """Return a batch whose floating-point tensors are changed by one unit of rounding."""
    generator = torch.Generator("cpu").manual_seed(seed)
    new = {
        path: leaf * _factors(leaf, generator, dtype)
        for path, leaf in leaves(batch)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel()
    }
    return rebuild(batch, new) if new else batch


def _factors(tensor: torch.Tensor, generator: torch.Generator, dtype: str) -> torch.Tensor:
    signs = torch.randint(
        0, 2, tensor.shape, generator=generator, dtype=torch.int8, device=generator.device
    )
    unit = torch.finfo(tensor.dtype).eps
    if dtype:
        unit = max(unit, torch.finfo(getattr(torch, dtype)).eps)
    # In the tensor's own dtype, so that a large one needs no wider copy.
    factors = signs.to(tensor.dtype).mul_(2 * unit).add_(1 - unit)
    return factors.to(tensor.device)
