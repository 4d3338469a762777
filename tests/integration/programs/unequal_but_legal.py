"""Calls collectives in different but equivalent ways on each rank, as grown code bases do."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from training_record import out_parser, seed_everything, write_record

DIM = 6


def publish_weights(weight: Tensor) -> None:
    """Send a matrix; the receiver has a flat buffer of the same number of elements."""
    if dist.get_rank() == 0:
        dist.broadcast(weight, 0)
        return
    buffer = torch.empty(weight.numel())
    dist.broadcast(buffer, src=0, group=dist.group.WORLD)
    weight.copy_(buffer.view_as(weight))


def mean_loss(loss: Tensor) -> Tensor:
    """Reduce with the defaults on rank 0 and with every argument written out elsewhere."""
    total = loss.detach().clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    else:
        handle = dist.all_reduce(total, op=dist.ReduceOp.SUM, group=dist.group.WORLD, async_op=True)
        handle.wait()
    return total / dist.get_world_size()


def trade_by_tag(step: int) -> float:
    """Receive two messages in the opposite order to that in which they were sent."""
    if dist.get_rank() == 0:
        header, body = torch.tensor([float(step)]), torch.full((2, 3), float(step))
        works = [dist.isend(header, dst=1, tag=1), dist.isend(body, dst=1, tag=2)]
        for work in works:
            work.wait()
        return float(step)
    body, header = torch.empty(6), torch.empty(1)
    dist.recv(body, src=0, tag=2)
    dist.recv(header, src=0, tag=1)
    return (header + body.sum()).item()


def share_rows(step: int) -> Tensor:
    """Exchange lists of blocks that are empty in some steps."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sends = [torch.full((step % 2 * (rank + 1), DIM), 1.0) for _ in range(world_size)]
    receives = [torch.empty(step % 2 * (peer + 1), DIM) for peer in range(world_size)]
    rows = torch.empty(sum(len(block) for block in receives), DIM)
    dist.all_to_all_single(
        rows,
        torch.cat(sends),
        [len(block) for block in receives],
        [len(block) for block in sends],
    )
    return rows


@record
def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(107 + dist.get_rank())
    model = nn.Linear(DIM, DIM)
    publish_weights(model.weight.data)
    publish_weights(model.bias.data)
    losses = []
    for step in range(5):
        inputs = torch.randn(4, DIM) + share_rows(step).sum()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.01 * parameter.grad
            parameter.grad = None
        losses += [mean_loss(loss).item(), trade_by_tag(step)]
        dist.all_reduce(torch.empty(0))
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
