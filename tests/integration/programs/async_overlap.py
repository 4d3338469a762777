"""Overlaps asynchronous collectives with computation and waits for them late, in every way."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training_record import out_parser, seed_everything, write_record


def reduce_gradients(model: nn.Module) -> None:
    """Start all reductions, then wait in the opposite order."""
    parameters = list(model.parameters())
    works = [dist.all_reduce(p.grad, async_op=True) for p in parameters]
    for parameter, work in zip(reversed(parameters), reversed(works), strict=True):
        work.wait()
        parameter.grad /= dist.get_world_size()


def chained_sum(value: Tensor) -> Tensor:
    """Halve the sum in a callback of the work's future."""
    work = dist.all_reduce(value, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] / 2)
    return future.wait()


def polled_sum(value: Tensor) -> Tensor:
    work = dist.all_reduce(value, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()
    return value


def coalesced_sums(values: list[Tensor]) -> list[Tensor]:
    dist.all_reduce_coalesced(values)
    return values


def uneven_exchange() -> Tensor:
    """Send one row to rank 0 and three rows to rank 1; what arrives is agreed beforehand."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sends, receives = [1, 3], [1 + 2 * rank] * world_size
    rows = torch.randn(sum(sends), 2)
    received = torch.empty(sum(receives), 2)
    work = dist.all_to_all_single(received, rows, receives, sends, async_op=True)
    work.wait()
    return received


def rooted(value: float) -> float:
    """Use the operations that have a root; only the root passes the list."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([value])
    dist.reduce(total, dst=1)
    parts = [torch.empty(1) for _ in range(world_size)] if rank == 0 else None
    dist.gather(torch.tensor([value]), parts, dst=0)
    mine = torch.empty(1)
    chunks = [torch.tensor([1.0 + i]) for i in range(world_size)] if rank == 1 else None
    dist.scatter(mine, chunks, src=1)
    return mine.item() + (sum(p.item() for p in parts) if parts else 0.0)


def sharded_sum() -> Tensor:
    world_size = dist.get_world_size()
    whole = torch.randn(world_size * 3)
    shard = torch.empty(3)
    work = dist.reduce_scatter_tensor(shard, whole, async_op=True)
    work.wait()
    gathered = torch.empty(world_size * 3)
    dist.all_gather_into_tensor(gathered, shard)
    return gathered


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(19)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed_everything(40 + rank)
    losses = []
    pending: tuple[Tensor, dist.Work] | None = None
    for step in range(6):
        inputs = torch.randn(8, 4)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        # The mean loss of a step is only looked at one step later.
        if pending is not None:
            pending[1].wait()
            losses.append(pending[0].item())
        value = loss.detach().clone()
        pending = (value, dist.all_reduce(value, async_op=True))
        losses += [rooted(loss.item()), chained_sum(torch.ones(2) * step).sum().item()]
        losses.append(polled_sum(torch.ones(2) * rank).sum().item())
    pending[1].wait()
    losses += [pending[0].item(), uneven_exchange().sum().item(), sharded_sum().sum().item()]
    losses += [v.sum().item() for v in coalesced_sums([torch.ones(2), torch.ones(3, 3)])]
    dist.barrier(async_op=True).wait()
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
