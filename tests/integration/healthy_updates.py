"""Right trainings, one after another, whose steps change little, skip, or round on purpose."""

import copy
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DIM = 32
STEPS = 10


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(DIM, 64),
        nn.LayerNorm(64),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 4),
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    inputs = torch.randn(16, DIM, generator=generator)
    return inputs, inputs[:, :4].argmax(1)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs, labels = batch(step)
    inputs = inputs.to(next(model.parameters()).dtype)
    return nn.functional.cross_entropy(model(inputs).float(), labels)


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def simple(make: Make, model: nn.Module | None = None, steps: int = STEPS) -> None:
    model = DistributedDataParallel(network() if model is None else model)
    optimizer = make([each for each in model.parameters() if each.requires_grad])
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def autocast() -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def half_precision() -> None:
    """A scaler that begins with a scale so large that it has to skip some steps."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    for step in range(2 * STEPS):
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class StochasticSGD(torch.optim.Optimizer):
    """Rounds up or down by chance, so that small updates count on average."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.0})
        self.generator = torch.Generator().manual_seed(7)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                exact = param.float() - group["lr"] * param.grad.float()
                bits = exact.view(torch.int32)
                noise = torch.randint(
                    1 << 16, bits.shape, dtype=torch.int32, generator=self.generator
                )
                param.copy_(((bits + noise) & -65536).view(torch.float32))


class CompensatedSGD(torch.optim.Optimizer):
    """Keeps what rounding cuts off."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                rest = self.state[param].setdefault("kahan_comp", torch.zeros_like(param))
                rest.sub_(group["lr"] * param.grad)
                before = param.clone()
                param.add_(rest)
                rest.add_(before.sub_(param))


class MasterAdam(torch.optim.Optimizer):
    """Keeps float32 copies of narrow parameters by itself."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.copies = [each.detach().float().requires_grad_() for each in params]
        self.inner = torch.optim.Adam(self.copies, lr=lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        params = self.param_groups[0]["params"]
        for param, master in zip(params, self.copies, strict=True):
            master.grad = param.grad.float()
        self.inner.step()
        for param, master in zip(params, self.copies, strict=True):
            param.copy_(master)


class Adapter(nn.Module):
    """A frozen layer and a low-rank change of it that begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs.to(self.base.weight.dtype)).float() + self.up(
            self.down(inputs.float())
        )


def adapted() -> nn.Module:
    """Adapters in float32 on a frozen model in bfloat16."""
    return nn.Sequential(
        Adapter(nn.Linear(DIM, 64).bfloat16()), nn.GELU(), Adapter(nn.Linear(64, 4).bfloat16())
    )


def adversarial() -> None:
    maker = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, DIM)))
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 1)))
    first = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
    second = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    soft = nn.functional.softplus
    for step in range(STEPS):
        inputs, _ = batch(step)
        second.zero_grad()
        made = maker(inputs[:, :8])
        scores = critic(torch.cat((inputs, made.detach())))
        (soft(-scores[:16]).mean() + soft(scores[16:]).mean()).backward()
        second.step()
        first.zero_grad()
        soft(-critic(made)).mean().backward()
        first.step()


class Tied(nn.Module):
    """An embedding that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))


def tied() -> None:
    model = DistributedDataParallel(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        tokens = torch.randint(64, (16, 9), generator=generator)
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def averaged() -> None:
    """The average of the weights over time, kept beside the model."""
    model = DistributedDataParallel(network())
    average = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, param in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(param, 0.001)


def scheduled(factor: Callable[[int], float], steps: int, lr: float, narrow: bool = False) -> None:
    model = DistributedDataParallel(network().bfloat16() if narrow else network())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def by_hand(steps: int) -> None:
    """A warm-up that the program sets itself."""
    model = DistributedDataParallel(network().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-6 * step
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated() -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4 * STEPS):
        (loss_of(model, step) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def resting_group() -> None:
    """One group of narrow parameters rests at a rate of zero."""
    model = DistributedDataParallel(network().bfloat16())
    rest = [each for name, each in model.named_parameters() if "1." in name]
    others = [each for name, each in model.named_parameters() if "1." not in name]
    optimizer = torch.optim.SGD([{"params": others, "lr": 0.5}, {"params": rest, "lr": 0.0}])
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    for make in (
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda params: torch.optim.Adam(params, lr=1e-3),
        lambda params: torch.optim.AdamW(params, lr=1e-5),
        lambda params: torch.optim.Adafactor(params, lr=1e-2),
        lambda params: torch.optim.RMSprop(params, lr=1e-3),
        lambda params: torch.optim.Adagrad(params, lr=1e-2),
    ):
        simple(make)
    simple(lambda params: StochasticSGD(params, lr=1e-2), network().bfloat16(), steps=40)
    simple(lambda params: CompensatedSGD(params, lr=1e-4), network().bfloat16())
    simple(lambda params: MasterAdam(params, lr=1e-5), network().bfloat16())
    simple(lambda params: torch.optim.AdamW(params, lr=1e-3), adapted())
    autocast()
    half_precision()
    adversarial()
    tied()
    averaged()
    scheduled(lambda step: step / 1000, STEPS, lr=0.1, narrow=True)
    scheduled(lambda step: (1 + math.cos(math.pi * min(step / 20, 1))) / 2, 40, lr=0.1)
    by_hand(STEPS)
    accumulated()
    resting_group()
    print("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
