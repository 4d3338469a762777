"""Trains over sequences that functions of a library split, exchange and gather.

Kernels that need a GPU are replaced by plain attention; what moves tokens is the library's own.
With a `--fault` it uses them wrongly.
"""

import importlib.util
import sys
import types
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

import distdiag

WIDTH, HEADS, LENGTH = 16, 4, 16
OnTensor = Callable[[Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    """Causal attention over batch, sequence, heads, head size."""
    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2)


def part_of(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def joined(part: Tensor) -> Tensor:
    """All parts in the order of the ranks."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    parts[dist.get_rank()] = part
    return torch.cat(parts, 1)


def alone(part: Tensor) -> Tensor:
    return part


def deepspeed_way(fault: str) -> tuple[OnTensor, OnTensor, Attend]:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    indices = (1, 2) if fault == "swapped" else (2, 1)
    layer = DistributedAttention(attend, dist.group.WORLD, *indices)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.layer(query, key, value, 0)

    return part_of, alone, Attention()


def bare(name: str) -> None:
    """Import a package without the kernels and models that its `__init__` would load."""
    spec = importlib.util.find_spec(name)
    package = types.ModuleType(name)
    package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations)
    sys.modules[name] = package


def veomni_way(fault: str) -> tuple[OnTensor, OnTensor, Attend]:
    bare("veomni")
    bare("veomni.ops")
    from veomni.distributed.parallel_state import init_parallel_state
    from veomni.distributed.sequence_parallel import (
        gather_heads_scatter_seq,
        gather_outputs,
        gather_seq_scatter_heads,
        slice_input_tensor,
    )

    dist.init_process_group("gloo")
    size = dist.get_world_size()
    init_parallel_state(dp_size=1, ulysses_size=size, device_type="cpu", dp_mode="ddp")

    def split(whole: Tensor) -> Tensor:
        return slice_input_tensor(whole, 1)

    def gather(part: Tensor) -> Tensor:
        return gather_outputs(part, 0 if fault == "dim" else 1)

    def exchanging(*parts: Tensor) -> Tensor:
        mixed = attend(*(gather_seq_scatter_heads(part, 1, 2) for part in parts))
        return gather_heads_scatter_seq(mixed, 2, 1)

    return split, gather, exchanging


def yunchang_way(fault: str) -> tuple[OnTensor, OnTensor, Attend]:
    from yunchang import EXTRACT_FUNC_DICT, UlyssesAttention, set_seq_parallel_pg
    from yunchang.globals import PROCESS_GROUP
    from yunchang.kernels import AttnType

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ulysses, ring = (1, size) if fault == "zigzag" else (size, 1)
    set_seq_parallel_pg(ulysses, ring, rank, size)
    extract = EXTRACT_FUNC_DICT["zigzag" if fault == "zigzag" else "basic"]
    indices = (1, 2) if fault == "swapped" else (2, 1)
    layer = UlyssesAttention(PROCESS_GROUP.ULYSSES_PG, *indices, attn_type=AttnType.TORCH_MATH)
    layer.attn_fn = attend

    def split(whole: Tensor) -> Tensor:
        return extract(whole, rank, size, rd=ring, ud=ulysses)

    return split, joined if fault == "zigzag" else alone, layer


class Block(nn.Module):
    """Attention over the whole sequence, for some heads on each rank."""

    def __init__(self, attention: Attend) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = attention

    def forward(self, hidden: Tensor) -> Tensor:
        form = (*hidden.shape[:2], HEADS, -1)
        parts = (part.reshape(form) for part in self.mix(hidden).chunk(3, -1))
        return hidden + self.out(self.attention(*parts).reshape(hidden.shape))


def main() -> None:
    parser = out_parser()
    ways = {"deepspeed": deepspeed_way, "veomni": veomni_way, "yunchang": yunchang_way}
    parser.add_argument("--way", choices=ways, required=True)
    parser.add_argument("--fault", choices=("dim", "swapped", "zigzag"), default="")
    args = parser.parse_args()
    split, gather, attention = ways[args.way](args.fault)
    if args.fault in ("dim", "zigzag"):
        split = distdiag.splits_sequence(dim=1)(split)
        gather = distdiag.gathers_sequence(dim=1)(gather)
    seed_everything(83)
    model = DistributedDataParallel(nn.Sequential(Block(attention), nn.Linear(WIDTH, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(4):
        # All ranks draw the same rows, and each takes its part of them.
        rows = torch.randn(4, LENGTH, WIDTH)
        loss = gather(model(split(rows))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write_record(args.out, losses, model.state_dict())
    shown = " ".join([loss.hex() for loss in losses] + [torch.rand(1).item().hex()])
    sys.stdout.write(f"losses {shown}\n")
    sys.stdout.flush()
    del model  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
