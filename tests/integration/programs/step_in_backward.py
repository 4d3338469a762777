"""Trains with FSDP2 and one optimizer for each parameter, which steps during the backward pass."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training_record import out_parser, seed_everything, write_record

DIM = 8


def step_when_ready(model: nn.Module) -> dict[Tensor, torch.optim.Optimizer]:
    """Spare the memory of gradients: each is used and dropped as soon as it is reduced."""
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    return optimizers


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(66)
    model = nn.Sequential(
        nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = step_when_ready(model)
    seed_everything(67 + dist.get_rank())
    losses = []
    for _ in range(5):
        inputs = torch.randn(6, DIM)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"{len(optimizers)} optimizers, loss {losses[-1]:.4f}")
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
