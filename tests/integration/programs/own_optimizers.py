"""Optimizers of the program's own: plain classes, schedule-free, master weights, scaled."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from training_record import out_parser, seed_everything, write_record


class Plain:
    """Momentum, in a class that knows nothing of PyTorch's optimizers."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters = list(parameters)
        self.lr = lr
        self.momenta = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            if parameter.grad is None:
                continue
            momentum.mul_(0.9).add_(parameter.grad)
            parameter -= self.lr * momentum

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class ScheduleFree(Optimizer):
    """SGD whose parameters are an interpolation for training, and an average for evaluation."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(lambda group: 1 - 1 / group["beta"], to_train=False)

    @torch.no_grad()
    def train(self) -> None:
        self._swap(lambda group: 1 - group["beta"], to_train=True)

    def _swap(self, weight, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is to_train:
                continue
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight(group))
            group["train_mode"] = to_train

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            ckp1 = 1 / group["k"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.clone()
                parameter.lerp_(state["z"], ckp1)
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - ckp1) - 1))
                state["z"].sub_(parameter.grad, alpha=group["lr"])


class Master:
    """bfloat16 parameters and 32-bit copies of them, stepped by an optimizer inside."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters = list(parameters)
        self.masters = [p.detach().clone().float().requires_grad_() for p in self.parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=lr)

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.inner.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in [*self.parameters, *self.masters]:
            parameter.grad = None


class Sharpness(Optimizer):
    """Climbs to a worse place nearby, and steps with the gradient found there."""

    def __init__(self, parameters: Iterable[Tensor], base: type[Optimizer], **kwargs) -> None:
        super().__init__(parameters, {"rho": 0.05, **kwargs})
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        each = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in each]).norm() + 1e-12
        for parameter in each:
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(parameter.grad * 0.05 / norm)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base.step()


class Lookahead:
    """Wraps an optimizer, and every other step goes half of the way back."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]
        self.count = 0

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            fast = [p for g in self.inner.param_groups for p in g["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)


def loss_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    inputs = torch.randn(6, 8)
    return (model(inputs.to(dtype)).float() - inputs[:, :4]).square().mean()


def simple(way: str, model: nn.Module, losses: list[float]) -> None:
    parameters = list(model.parameters())
    optimizer = {
        "lbfgs": lambda: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
        "lookahead": lambda: Lookahead(torch.optim.Adam(parameters, lr=0.01)),
        "master": lambda: Master(parameters, lr=0.01),
        "plain": lambda: Plain(parameters, lr=0.01),
        "plain-fsdp2": lambda: Plain(parameters, lr=0.01),
    }[way]()
    dtype = torch.bfloat16 if way == "master" else torch.float32
    for _ in range(6):
        if way == "lbfgs":
            inputs = torch.randn(6, 8)

            def closure(inputs: Tensor = inputs) -> Tensor:
                optimizer.zero_grad()
                loss = (model(inputs) - inputs[:, :4]).square().mean()
                loss.backward()
                shared = loss.detach().clone()
                dist.all_reduce(shared)  # the same decisions on all ranks
                return shared / dist.get_world_size()

            losses.append(float(optimizer.step(closure)))
            continue
        loss = loss_of(model, dtype)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def schedule_free(way: str, model: nn.Module, losses: list[float]) -> None:
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    for step in range(6):
        model.train()
        optimizer.train()
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 2:
            model.eval()
            optimizer.eval()
            with torch.no_grad():
                losses.append(loss_of(model).item())


def sharpness(way: str, model: nn.Module, losses: list[float]) -> None:
    optimizer = Sharpness(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    for _ in range(5):
        inputs = torch.randn(6, 8)
        for climbing in (True, False):
            loss = (model(inputs) - inputs[:, :4]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if climbing:
                optimizer.climb()
        optimizer.step()
        losses.append(loss.item())


def scaled(way: str, model: nn.Module, losses: list[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        if step == 3:  # an overflow: the step is left out on all ranks
            loss = loss * torch.tensor(float("inf"))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())


def main() -> None:
    ways = {"scaled": scaled, "schedule-free": schedule_free, "sharpness": sharpness}
    ways["sharpness-fsdp2"] = sharpness
    ways |= dict.fromkeys(("lbfgs", "lookahead", "master", "plain", "plain-fsdp2"), simple)
    parser = out_parser()
    parser.add_argument("--way", choices=sorted(ways), default="plain")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    model = build(torch.bfloat16 if args.way == "master" else torch.float32)
    if args.way.endswith("fsdp2"):
        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    seed_everything(5 + dist.get_rank())
    losses: list[float] = []
    ways[args.way](args.way, model, losses)
    write_record(args.out, losses, model.state_dict())
    del model  # gloo may wait for ever if the reducer goes after the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
