"""Where DeepSpeed keeps gradients between a backward pass and the step, and what it divides by.

Its own functions for this send all parts to all ranks. Here each rank reads what it has: the map
from parameters to parts of flat tensors on which they are built.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Final

import torch.distributed as dist
from torch import nn

from distdiag.probes.gradients.leaves import Kept, Leaf, Part
from distdiag.probes.untyped import Untyped

ENGINE: Final = "deepspeed.runtime.engine"


def kept_by_deepspeed(root: nn.Module) -> Kept | None:
    """Return where the engine of a model keeps gradients, None if it has none."""
    kind = getattr(sys.modules.get(ENGINE), "DeepSpeedEngine", None)
    engine = next((m for m in root.modules() if kind is not None and isinstance(m, kind)), None)
    if engine is None:
        return None
    optimizer: Untyped = engine.optimizer
    for attribute, read in _KEPT_BY.items():
        if hasattr(optimizer, attribute):
            leaves = {id(leaf.leaf): leaf for leaf in read(optimizer)}
            return Kept(leaves, _loss_scale(optimizer))
    # Without an optimizer of its own, the program's holds the parameters themselves.
    is_own = type(optimizer).__module__.startswith("deepspeed.runtime")
    return Kept(unread=f"DeepSpeed ({type(optimizer).__name__})" if is_own else "")


def _loss_scale(optimizer: Untyped) -> float:
    scale = getattr(optimizer, "loss_scale", 1.0)
    return float(scale) if isinstance(scale, (int, float)) and scale > 0 else 1.0


def _partitioned(optimizer: Untyped) -> Iterator[Leaf]:
    """Yield the parameters of stage 3, each of which is cut into equal parts."""
    for group in optimizer.fp16_groups:
        for parameter in group:
            place = optimizer.grad_position.get(parameter.ds_id)
            if place is None:
                continue
            index, start, size = place
            members = tuple(dist.get_process_group_ranks(parameter.ds_process_group))
            first = min(size * members.index(dist.get_rank()), parameter.ds_numel)
            number = min(size, parameter.ds_numel - first)
            held = optimizer.fp32_partitioned_groups_flat[index]
            part = Part(held, first, start, number)
            yield Leaf("", parameter, parameter.ds_numel, (part,), members, 1)


def _in_flat_partitions(
    groups: str, held: str, process_groups: str
) -> Callable[[Untyped], Iterator[Leaf]]:
    def read(optimizer: Untyped) -> Iterator[Leaf]:
        """Yield the parameters of stages that cut the whole of a group into equal parts."""
        ranks_of = getattr(optimizer, process_groups)
        for index, group in enumerate(getattr(optimizer, groups)):
            members = tuple(dist.get_process_group_ranks(ranks_of[index]))
            for parameter in group:
                mapping = parameter._hp_mapping
                parts: tuple[Part, ...] = ()
                if mapping is not None:
                    whole, own = mapping.lp_fragment_address, mapping.hp_fragment_address
                    flat = getattr(optimizer, held)[index]
                    parts = (Part(flat, whole.start, own.start, own.numel),)
                yield Leaf("", parameter, parameter.numel(), parts, members, 1)

    return read


def _copied_one_by_one(optimizer: Untyped) -> Iterator[Leaf]:
    for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, copy in zip(low, high, strict=True):
            yield Leaf("", parameter, parameter.numel(), (Part(copy),))


def _copied_into_one(optimizer: Untyped) -> Iterator[Leaf]:
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        start = 0
        for parameter in group:
            number = parameter.numel()
            yield Leaf("", parameter, number, (Part(flat, 0, start, number),))
            start += number


_KEPT_BY: Final = {
    "fp32_partitioned_groups_flat": _partitioned,
    "single_partition_of_fp32_groups": _in_flat_partitions(
        "bit16_groups", "single_partition_of_fp32_groups", "real_dp_process_group"
    ),
    "fp32_groups_flat_partition": _in_flat_partitions(
        "bf16_groups", "fp32_groups_flat_partition", "real_dp_process_group"
    ),
    "fp32_groups_flat": _copied_into_one,
    "fp32_groups": _copied_one_by_one,
}
"""By an attribute that only optimizers of one kind have: stage 3, stages 1 and 2, bfloat16 without
stages, and half precision without stages, in one tensor or in one for each parameter."""
