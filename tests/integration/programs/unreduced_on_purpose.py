"""Steps DDP under no_sync, and brings the ranks together again in a way of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

STEPS = 9
PERIOD = 3


def after_backward(way: str, model: nn.Module) -> None:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if way == "flat":
        flat = torch.cat([grad.flatten() for grad in grads]) / dist.get_world_size()
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


@torch.no_grad()
def signs(model: nn.Module, rate: float) -> None:
    """Step by the largest entries of all ranks, and leave the gradients as they are."""
    for parameter in model.parameters():
        grad = parameter.grad.flatten()
        values, places = grad.abs().topk(1)
        reported = torch.stack([places.float(), grad[places].sign() * values])
        heard = [torch.empty_like(reported) for _ in range(dist.get_world_size())]
        dist.all_gather(heard, reported)
        for where, value in heard:
            parameter.view(-1)[where.long()] -= rate * value


@torch.no_grad()
def after_step(way: str, model: nn.Module, step: int) -> None:
    parameters = list(model.parameters())
    if way == "averages" and step % PERIOD == PERIOD - 1:
        for parameter in parameters:
            parameter.div_(dist.get_world_size())
            dist.all_reduce(parameter)
    if way == "streams":
        chosen = parameters[step % len(parameters)]
        chosen.div_(dist.get_world_size())
        dist.all_reduce(chosen)
    if way == "gossip":
        other = 1 - dist.get_rank()
        flat = torch.cat([parameter.flatten() for parameter in parameters])
        heard = torch.empty_like(flat)
        sent = dist.isend(flat, other)
        dist.recv(heard, other)
        sent.wait()
        mean = (flat + heard) / 2
        for parameter, part in zip(
            parameters, mean.split([each.numel() for each in parameters]), strict=True
        ):
            parameter.copy_(part.view_as(parameter))


class SignStep(torch.optim.SGD):
    """Applies what all ranks say of their gradients."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        super().__init__(model.parameters(), lr=rate)
        self.model = model

    def step(self, closure: None = None) -> None:
        signs(self.model, self.param_groups[0]["lr"])


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", default="averages")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(51)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1)))
    if args.way == "signs":
        optimizer: torch.optim.Optimizer = SignStep(model, 0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seed_everything(60 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        inputs = torch.randn(8, 6)
        with model.no_sync():
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
        after_backward(args.way, model)
        optimizer.step()
        optimizer.zero_grad()
        after_step(args.way, model, step)
        losses.append(loss.item())
    print(f"rank {dist.get_rank()} loss {losses[-1]:.4f}")
    write_record(args.out, losses, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
