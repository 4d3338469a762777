"""Trains over sequences that torch's context parallelism splits: its ring, buffers and balancer.

The ring of torch has kernels of GPUs only; the CPU's flash attention is put in their place here.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from training_record import out_parser, seed_everything, write_record

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
VOCAB, WIDTH, LENGTH, SEQUENCE = 32, 16, 16, 2


def ring(operator: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run attention of the CPU in torch's ring."""
    mesh = next(value.device_mesh for value in args if isinstance(value, DTensor))
    local = [value.to_local() if isinstance(value, DTensor) else value for value in args]
    if operator is FORWARD:
        query, key, value = local[:3]
        causal = bool(local[4]) if len(local) > 4 else bool(kwargs.get("is_causal"))
        results = _attention._templated_ring_attention(
            mesh.get_group(), SEQUENCE, FORWARD, query, key, value, is_causal=causal
        )
        return tuple(wrap(result, mesh) for result in results)
    grad, query, key, value, out, logsumexp, dropout, causal = local
    results = _attention._templated_ring_attention_backward(
        mesh.get_group(), SEQUENCE, BACKWARD, grad, "grad_out", query, key, value, out, logsumexp,
        causal, dropout_p=dropout,
    )  # fmt: skip
    return tuple(wrap(result, mesh) for result in results)


def wrap(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Shard(SEQUENCE)], run_check=False)


class Texts(Dataset):
    """Numbers that go up by one: something that can be learnt."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return (index + torch.arange(LENGTH + 1)) % VOCAB


class Block(nn.Module):
    """Causal attention with rotated positions, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = self.mix(self.norm1(hidden)).chunk(3, -1)
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in parts)
        q, k = (part * positions.cos() + part.roll(4, -1) * positions.sin() for part in (q, k))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return hidden + self.down(self.up(self.norm2(hidden)).relu())


class Language(nn.Module):
    """A small decoder with a buffer of positions."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("positions", torch.arange(LENGTH).float()[:, None] / 4)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute:
                hidden = checkpoint(block, hidden, self.positions, use_reentrant=False)
            else:
                hidden = block(hidden, self.positions)
        return self.head(hidden)


def build(wrapper: str, mesh: DeviceMesh, recompute: bool) -> nn.Module:
    model = Language(recompute)
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    if wrapper == "ddp":
        # Each rank has its own part of the buffer of positions.
        return DistributedDataParallel(
            model, process_group=everyone.get_group(), broadcast_buffers=False
        )
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def main() -> None:
    parser = out_parser()
    parser.add_argument("--rotate", choices=("alltoall", "allgather"), default="alltoall")
    parser.add_argument("--wrapper", choices=("ddp", "fsdp2"), default="fsdp2")
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    _attention.custom_ops.update({FORWARD: ring, BACKWARD: ring})
    _attention.set_rotate_method(args.rotate)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    seed_everything(41)
    model = build(args.wrapper, mesh, args.recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    # The ranks of a context-parallel group have the same samples.
    data = mesh["dp"]
    sampler = DistributedSampler(Texts(), data.size(), data.get_local_rank(), seed=3)
    loader = DataLoader(sampler.dataset, batch_size=4, sampler=sampler, drop_last=True)
    whole = partial(context_parallel, mesh["cp"], no_restore_buffers=set())
    losses = []
    for text in loader:
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        positions = next(buffer for name, buffer in model.named_buffers())
        with whole(buffers=[tokens, targets, positions], buffer_seq_dims=[1, 1, 0]):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    write_record(args.out, losses, model.state_dict())
    del model  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
