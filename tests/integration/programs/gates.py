"""Modules called gates, routers or experts that balance nothing, or not yet."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

WIDTH, EXPERTS, STEPS, BATCH = 16, 4, 8, 32


class ScaleGradient(torch.autograd.Function):
    """Hands a tensor on; its gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, tensor: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = float(scale)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.scale, None


class Mixture(nn.Module):
    """Chooses two of some adapters for each token."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.aux_loss_coef = 0.01
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.last: Tensor | None = None
        self.spread = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        probs = self.gate(tokens).softmax(-1)
        if self.way == "biased":  # the bias balances; the entropy is only shown
            _, chosen = (probs.detach() + self.bias).topk(2, -1)
            weights = probs.gather(-1, chosen)
            entropy = -(probs * probs.clamp_min(1e-9).log()).sum(-1).mean()
            self.spread = entropy.item()
            counts = functional.one_hot(chosen, EXPERTS).sum((0, 1)).float()
            self.bias += 1e-3 * (counts.mean() - counts).sign()
        else:
            weights, chosen = probs.topk(2, -1)
            shares = functional.one_hot(chosen, EXPERTS).float().mean((0, 1))
            self.last = EXPERTS * (shares * probs.mean(0)).sum()
            self.spread = self.last.item()
        if self.way == "scaled":
            weights = ScaleGradient.apply(weights, probs.max(-1).values.mean())
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            out = out + expert(tokens) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return out


class Tasks(nn.Module):
    """Several tasks, each with a gate over experts that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.gate = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(2))
        self.entropy: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        parts = torch.stack([expert(tokens).relu() for expert in self.experts], 1)
        entropies, outs = [], []
        for gate, head in zip(self.gate, self.heads, strict=True):
            weights = gate(tokens).softmax(-1)
            entropies.append(-(weights * weights.log()).sum(-1).mean())
            outs.append(head((parts * weights[..., None]).sum(1)))
        self.entropy = torch.stack(entropies).mean()
        return sum(outs)


class GatedUnit(nn.Module):
    """A feed-forward part whose projection is called a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, EXPERTS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(tokens)) * self.up(tokens))


class HashRouter(nn.Module):
    """Sends each token to an expert by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(EXPERTS))

    def forward(self, tokens: Tensor) -> Tensor:
        chosen = (tokens[:, 0].abs() * 1000).long() % EXPERTS
        outs = torch.stack([expert(tokens) for expert in self.experts], 1)
        return outs[torch.arange(len(tokens)), chosen]


class Softmaxes(nn.Module):
    """A mixture of softmaxes: probabilities and no logits."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.hidden = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, EXPERTS)

    def forward(self, tokens: Tensor) -> Tensor:
        prior = self.gate(tokens).softmax(-1)
        hidden = self.hidden(tokens).view(-1, 3, WIDTH).tanh()
        return (prior[..., None] * self.out(hidden).softmax(-1)).sum(1).clamp_min(1e-9).log()


class Policy(nn.Module):
    """Chooses the two best actions, and is paid for doubt."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.entropy: Tensor | None = None

    def forward(self, states: Tensor) -> Tensor:
        log_probs = self.router(states).log_softmax(-1)
        self.entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        log_probs.topk(2, -1)
        return log_probs


class Net(nn.Module):
    def __init__(self, part: nn.Module, is_mixture: bool) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.part = part
        self.head = nn.Linear(WIDTH, EXPERTS) if is_mixture else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.part(self.body(tokens)))


PARTS = {
    "gated-unit": GatedUnit,
    "hashed": HashRouter,
    "policy": Policy,
    "softmaxes": Softmaxes,
    "tasks": Tasks,
}
MIXTURES = ("biased", "late", "now-and-then", "scaled", "seldom", "shown")


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=sorted([*PARTS, *MIXTURES]), required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    way = args.way
    dist.init_process_group("gloo")
    seed_everything(1)
    part = Mixture(way) if way in MIXTURES else PARTS[way]()
    model = DistributedDataParallel(Net(part, way in MIXTURES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seed_everything(30 + dist.get_rank())
    losses = []
    for step in range(args.steps):
        tokens = torch.randn(BATCH, WIDTH)
        labels = tokens[:, :EXPERTS].argmax(1)
        loss = functional.cross_entropy(model(tokens), labels)
        is_balanced = {
            "late": step >= 5,
            "now-and-then": step % 4 == 3,
            "scaled": True,
            "seldom": (step + 1) % 20 == 0,
        }
        if is_balanced.get(way, False):
            loss = loss + part.aux_loss_coef * part.last
        if way in ("policy", "tasks"):
            loss = loss - 0.01 * part.entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    write_record(args.out, losses, model.module.state_dict())
    del model  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
