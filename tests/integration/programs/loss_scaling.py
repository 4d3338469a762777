"""Trains in half precision: with a gradient scaler that skips a step, and with master weights."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

DIM = 8
SCALE = 64.0


class MasterWeights(torch.optim.Optimizer):
    """Steps on copies in single precision, and writes the result into the model."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        self.model_parameters = parameters
        self.masters = [parameter.detach().clone().float() for parameter in parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=lr)
        super().__init__(self.masters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.model_parameters, strict=True):
            master.grad = parameter.grad.float() / SCALE
        self.inner.step()
        for master, parameter in zip(self.masters, self.model_parameters, strict=True):
            parameter.copy_(master)
            parameter.grad = master.grad = None


def network(dtype: torch.dtype) -> nn.Module:
    seed_everything(74)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1)).to(dtype)
    return DistributedDataParallel(model)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs).float() - inputs.float().sum(1, keepdim=True)).square().mean()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    scaled, half = network(torch.float32), network(torch.bfloat16)
    # Begins too high: the first steps overflow and are skipped.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
    optimizer = torch.optim.Adam(scaled.parameters(), lr=1e-2)
    master_optimizer = MasterWeights(list(half.parameters()), lr=1e-2)
    seed_everything(75 + dist.get_rank())
    losses = []
    for _ in range(6):
        inputs = torch.randn(6, DIM) * 8
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(scaled, inputs)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        loss = loss_of(half, inputs.bfloat16())
        (loss * SCALE).backward()
        losses.append(loss.item())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(scaled.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        master_optimizer.step()
    if dist.get_rank() == 0:
        print(f"scale {scaler.get_scale():g}, losses {losses[-2]:.4f} {losses[-1]:.4f}")
    write_record(args.out, losses, half.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
