"""Train a small model; `--fault` spoils what its steps change, their types, or what they skip."""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

DIM = 32
CLASSES = 4
LENGTH = 160


class Perceptron(nn.Module):
    """Linear layers with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 2 * DIM)
        self.norm = nn.LayerNorm(2 * DIM)
        self.second = nn.Linear(2 * DIM, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(torch.relu(self.first(inputs))))


class Convolution(nn.Module):
    """Convolutions with group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.stem(inputs[:, None]))).mean(-1))


class Attention(nn.Module):
    """Self-attention over the features, whose positions are angles."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, DIM)
        self.norm = nn.RMSNorm(DIM)
        self.mix = nn.Linear(DIM, 3 * DIM)
        self.head = nn.Linear(DIM, CLASSES)
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs.repeat(1, LENGTH // DIM)[..., None])
        angles = torch.outer(torch.arange(LENGTH).float(), self.frequencies.float()) * 4
        turned = torch.cat((torch.cos(angles), torch.sin(angles)), -1).to(hidden.dtype)
        query, key, value = self.mix(self.norm(hidden + turned)).chunk(3, -1)
        hidden = hidden + nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head(hidden.mean(1))


class Lion(torch.optim.Optimizer):
    """Goes by the sign of an average of gradients."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                average = state.setdefault("exp_avg", torch.zeros_like(param))
                param.sub_(torch.sign(0.9 * average + 0.1 * param.grad), alpha=group["lr"])
                average.mul_(0.99).add_(param.grad, alpha=0.01)


MODELS = {"perceptron": Perceptron, "convolution": Convolution, "attention": Attention}
OPTIMIZERS = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr),
    "adafactor": lambda params, lr: torch.optim.Adafactor(params, lr=lr),
    "lion": Lion,
}


def build(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[args.model]()
    if args.fault in ("lost", "positions"):
        model.to(torch.bfloat16)
    elif args.fault == "lost-half":
        model.half()
    elif args.fault == "lost-norm":
        model.norm.to(torch.bfloat16)
    elif args.fault == "positions-right":
        for param in model.parameters():
            param.data = param.data.bfloat16()
    if args.wrapper == "ddp":
        return DistributedDataParallel(model)
    if args.wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        is_mixed = args.fault in ("lost", "lost-right")
        fully_shard(
            model,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(torch.bfloat16 if is_mixed else None, torch.float32),
        )
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    inputs = torch.randn(16, DIM, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(1)


def average_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def loss_of(args: argparse.Namespace, model: nn.Module, step: int) -> torch.Tensor:
    inputs, labels = batch(step)
    if not args.is_autocast:
        inputs = inputs.to(next(model.parameters()).dtype)
    logits = model(inputs).float()
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    if args.fault == "vanish":
        losses = losses * (labels >= CLASSES)  # the mask lets nothing through
    if args.fault == "endless":
        losses = losses + (logits - logits).sqrt().sum(1)
    if args.fault.startswith("scaler-local") and step == 3 and dist.get_rank() == 1:
        losses = losses * float("inf")
    return losses.mean()


def train(args: argparse.Namespace) -> None:
    model = build(args)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", enabled=args.has_scaler, init_scale=2.0**8)
    outer = nullcontext()
    if args.fault == "region":
        outer = torch.autocast("cpu", torch.bfloat16)
    with outer:
        for step in range(args.steps):
            take_step(args, model, optimizer, scaler, step)


def take_step(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    step: int,
) -> None:
    is_inner = args.is_autocast and args.fault != "region"
    with torch.autocast("cpu", torch.bfloat16) if is_inner else nullcontext():
        loss = loss_of(args, model, step)
    scaler.scale(loss).backward()
    if args.fault == "scaler-local":
        scaler.unscale_(optimizer)
    if args.wrapper == "plain":
        average_gradients(model)
    if args.fault == "explode":
        for param in model.parameters():
            param.grad *= 30.0**step
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if args.fault == "state" and dist.get_rank() == 1 and step == 0:
        for state in optimizer.state.values():  # as from a checkpoint of another type
            state.update({key: value.bfloat16() for key, value in state.items()})
    print(f"step {step} loss {loss.item():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="perceptron")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--wrapper", choices=("plain", "ddp", "fsdp2"), default="ddp")
    parser.add_argument("--fault", default="none")
    parser.add_argument("--right", action="store_true", help="the same training without the fault")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=9)
    args = parser.parse_args()
    args.has_scaler = args.fault in ("scaler-local", "endless")
    args.is_autocast = args.fault == "region"
    if args.right:
        args.is_autocast |= args.fault.startswith("lost") and args.wrapper != "fsdp2"
        args.fault += "-right"
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
