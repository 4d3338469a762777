"""Each rank has experts of its own, which the wrapper around the rest is told to ignore."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

WIDTH, EXPERTS = 16, 4


class Exchange(torch.autograd.Function):
    """All-to-all of rows whose gradient travels the way back."""

    @staticmethod
    def forward(ctx, rows: Tensor, receives: list[int], sends: list[int]) -> Tensor:
        ctx.receives, ctx.sends = receives, sends
        received = rows.new_empty(sum(receives), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        returned = grad.new_empty(sum(ctx.sends), grad.shape[1])
        dist.all_to_all_single(returned, grad.contiguous(), ctx.sends, ctx.receives)
        return returned, None, None


class Expert(nn.Module):
    """A small network that remembers how large its tokens are on average."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        if len(tokens):
            self.seen.lerp_(tokens.detach().abs().mean(), 0.1)
        return self.scale * self.down(torch.relu(self.up(tokens)))


class MoE(nn.Module):
    """A router on every rank, and experts spread over the ranks."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        # All are drawn on all ranks, and each keeps its own: as one process would have them.
        drawn = [Expert() for _ in range(EXPERTS)]
        each = EXPERTS // dist.get_world_size()
        first = each * dist.get_rank()
        kept = enumerate(drawn[first : first + each], first if names == "global" else 0)
        self.experts = nn.ModuleDict({str(number): expert for number, expert in kept})

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.router(self.norm(tokens)).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=EXPERTS)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        world = dist.get_world_size()
        sends, receives = (counts.view(world, -1).sum(1).tolist() for counts in (sent, came))
        rows = Exchange.apply(tokens[order], receives, sends)
        owner = torch.arange(EXPERTS // world).repeat(world).repeat_interleave(came)
        done = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts.values()):
            mine = (owner == number).nonzero().flatten()
            done = done.index_copy(0, mine, expert(rows[mine]))
        back = Exchange.apply(done, sends, receives)
        mixed = torch.zeros_like(tokens).index_copy(0, order, back)
        return tokens + mixed * weights[:, None]


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    """Wrap all but the experts."""
    experts = model[1].experts
    if wrapper == "ddp":
        inside = [*experts.named_parameters(), *experts.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, [f"1.experts.{name}" for name, _ in inside]
        )
        return DistributedDataParallel(model)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(
            model,
            ignored_modules=[experts],
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    fully_shard(model, ignored_params=set(experts.parameters()))
    return model


def main() -> None:
    parser = out_parser()
    parser.add_argument("--wrapper", choices=("ddp", "fsdp1", "fsdp2"), default="ddp")
    parser.add_argument("--names", choices=("global", "local"), default="global")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(17)
    net = nn.Sequential(nn.Linear(8, WIDTH), MoE(args.names), nn.Linear(WIDTH, 1))
    experts = list(net[1].experts.parameters())
    model = wrapped(net, args.wrapper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(6):
        inputs = torch.randn(32, 8, generator=data)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        # Tokens of all ranks have gone through them: what the wrapper does for the others.
        for parameter in experts:
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    write_record(args.out, losses, {str(number): each for number, each in enumerate(experts)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
