"""Computes attention over a sequence split across ranks by passing keys and values round a ring."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import Tensor, nn
from training_record import out_parser, seed_everything, write_record

DIM = 8


def rotate(tensors: list[Tensor]) -> list[Tensor]:
    """Pass tensors to the next rank and take those of the one before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations = []
    for mine, theirs in zip(tensors, received, strict=True):
        send = dist.P2POp(dist.isend, mine.contiguous(), (rank + 1) % world_size)
        receive = dist.P2POp(dist.irecv, theirs, (rank - 1) % world_size)
        # Even ranks send first: the order within a batch differs between ranks.
        operations += [send, receive] if rank % 2 == 0 else [receive, send]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@torch.no_grad()
def ring_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores, values = [], []
    for _ in range(dist.get_world_size()):
        scores.append(query @ key.transpose(-1, -2) / DIM**0.5)
        values.append(value)
        key, value = rotate([key, value])
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(values, -2)


def gathered_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Gather with gradients, as training does."""
    keys = torch.cat(dist_functional.all_gather(key.contiguous()), -2)
    values = torch.cat(dist_functional.all_gather(value.contiguous()), -2)
    return (query @ keys.transpose(-1, -2) / DIM**0.5).softmax(-1) @ values


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(73)
    projection = nn.Linear(DIM, 3 * DIM)
    optimizer = torch.optim.SGD(projection.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(4):
        hidden = torch.randn(2, 6, DIM, generator=data)
        query, key, value = projection(hidden).chunk(3, -1)
        output = gathered_attention(query, key, value)
        if step % 2 == 1:
            difference = (ring_attention(query, key, value) - output).abs().max()
            assert difference < 0.5
        loss = dist_functional.all_reduce((output - hidden).square().mean()) / 2
        loss.backward()
        for parameter in projection.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write_record(args.out, losses, projection.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
