"""Serves parameters from rank 0, which never trains, to workers that ask until they are done."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from training_record import out_parser, seed_everything, write_record

GRADIENT, DONE = 1, 2


def build_model() -> nn.Module:
    seed_everything(67)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def serve(model: nn.Module) -> None:
    weights = parameters_to_vector(model.parameters()).detach()
    num_active = dist.get_world_size() - 1
    while num_active:
        request = torch.empty(1, dtype=torch.long)
        worker = dist.recv(request)
        if request.item() == DONE:
            num_active -= 1
            continue
        gradient = torch.empty_like(weights)
        dist.recv(gradient, src=worker, tag=GRADIENT)
        weights -= 0.05 * gradient
        dist.send(weights, dst=worker)
    vector_to_parameters(weights, model.parameters())


def work(model: nn.Module, num_steps: int) -> list[float]:
    losses = []
    weights = parameters_to_vector(model.parameters()).detach()
    for _ in range(num_steps):
        inputs = torch.randn(8, 6)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        dist.send(torch.tensor([GRADIENT]), dst=0)
        dist.send(torch.cat([g.reshape(-1) for g in gradients]), dst=0, tag=GRADIENT)
        dist.recv(weights, src=0)
        vector_to_parameters(weights, model.parameters())
        losses.append(loss.item())
    dist.send(torch.tensor([DONE]), dst=0)
    return losses


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    model = build_model()
    losses = []
    if dist.get_rank() == 0:
        serve(model)
    else:
        losses = work(model, num_steps=10)
    dist.barrier()
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
