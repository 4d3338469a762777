"""Sends the weights once, takes local steps, and applies the averaged change every few of them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training_record import out_parser, seed_everything, write_record

LOCAL_STEPS = 4


@torch.no_grad()
def outer_step(model: nn.Module, anchors: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Move the common anchors by the mean change of all ranks, and go on from there."""
    for anchor, parameter in zip(anchors, model.parameters(), strict=True):
        change = anchor - parameter
        dist.all_reduce(change)
        anchor.grad = change / dist.get_world_size()
    optimizer.step()
    for anchor, parameter in zip(anchors, model.parameters(), strict=True):
        parameter.copy_(anchor)


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(52 + rank)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    anchors = [parameter.detach().clone() for parameter in model.parameters()]
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    losses = []
    for step in range(2 * LOCAL_STEPS):
        inputs = torch.randn(8, 6)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        inner.step()
        inner.zero_grad()
        losses.append(loss.item())
        if step % LOCAL_STEPS == LOCAL_STEPS - 1:
            outer_step(model, anchors, outer)
    print(f"rank {rank} loss {losses[-1]:.4f}")
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
