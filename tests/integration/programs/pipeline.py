"""Trains a two-stage pipeline by hand with blocking, non-blocking and batched point-to-point."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training_record import out_parser, seed_everything, write_record

NUM_MICRO, BATCH, DIM = 4, 4, 16


def first_stage_step(stage: nn.Module, inputs: Tensor, *, style: str) -> None:
    outputs = []
    for micro in inputs.chunk(NUM_MICRO):
        output = stage(micro)
        outputs.append(output)
        if style == "blocking":
            dist.send(output.detach(), dst=1, tag=7)
        else:
            dist.isend(output.detach(), dst=1, tag=7).wait()
    for output in outputs:
        grad = torch.empty_like(output)
        if style == "blocking":
            dist.recv(grad, src=1)
        else:
            dist.irecv(grad, src=1).wait()
        output.backward(grad)


def last_stage_step(stage: nn.Module, targets: Tensor, *, style: str) -> list[float]:
    received = [torch.empty(BATCH, DIM) for _ in range(NUM_MICRO)]
    if style == "blocking":
        for buffer in received:
            dist.recv(buffer, src=0, tag=7)
    else:
        works = [dist.irecv(buffer, src=0, tag=7) for buffer in received]
        for work in works:
            work.wait()
    losses, pending = [], []
    for buffer, target in zip(received, targets.chunk(NUM_MICRO), strict=True):
        buffer.requires_grad_()
        loss = (stage(buffer) - target).square().mean() / NUM_MICRO
        loss.backward()
        losses.append(loss.item())
        if style == "blocking":
            dist.send(buffer.grad, dst=0)
        else:
            pending.append(dist.isend(buffer.grad, dst=0))
    for work in pending:
        work.wait()
    return losses


def exchange_statistics(value: float) -> float:
    """Swap one number with the other stage, both directions in one batch."""
    peer = 1 - dist.get_rank()
    mine, theirs = torch.tensor([value]), torch.empty(1)
    operations = [
        dist.P2POp(dist.isend, mine, peer),
        dist.P2POp(dist.irecv, theirs, peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return theirs.item()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(9 + rank)
    stage = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM if rank == 0 else 1))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for step in range(6):
        style = "blocking" if step % 2 == 0 else "overlapped"
        inputs = torch.randn(NUM_MICRO * BATCH, DIM, generator=data)
        if rank == 0:
            first_stage_step(stage, inputs, style=style)
        else:
            losses += last_stage_step(stage, inputs.sum(1, keepdim=True), style=style)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(exchange_statistics(float(sum(losses) + step)))
    # Only the last stage knows the loss: the first one asks for it, whoever sends.
    if rank == 0:
        final = torch.empty(1)
        sender = dist.recv(final, src=None, tag=3)
        print(f"final loss {final.item():.4f} from rank {sender}")
    else:
        dist.send(torch.tensor([losses[-2]]), dst=0, tag=3)
    write_record(args.out, losses, stage.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
