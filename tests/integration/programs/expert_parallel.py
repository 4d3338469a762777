"""Trains experts spread over the data-parallel ranks, by uneven and empty exchanges."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_record import out_parser, seed_everything, write_record

VOCAB, WIDTH, EXPERTS, LENGTH = 32, 16, 4, 16


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


class Experts(nn.Module):
    """The experts of this rank, their weights stacked."""

    def __init__(self) -> None:
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        # All are drawn on all ranks, and each keeps its own: as one process would have them.
        up = torch.randn(EXPERTS, WIDTH, 32) / WIDTH**0.5
        down = torch.randn(EXPERTS, 32, WIDTH) / 32**0.5
        self.up = nn.Parameter(up.chunk(world)[rank].clone())
        self.down = nn.Parameter(down.chunk(world)[rank].clone())

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        parts = tokens.split(counts)
        done = [torch.relu(p @ u) @ d for p, u, d in zip(parts, self.up, self.down, strict=True)]
        return torch.cat(done)


class MoE(nn.Module):
    """A router, experts on all ranks, and an expert that every token visits."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.shared = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.way = way

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden.flatten(0, 1)
        logits = self.router(tokens).float()
        if self.way == "idle":
            # The second half of the experts gets nothing: a rank receives no token at all.
            hole = torch.tensor([0.0, 0.0, -1e4, -1e4])
            logits = logits + hole
        probs = logits.softmax(-1)
        weights, chosen = probs.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        share = nn.functional.one_hot(chosen, EXPERTS).float().mean((0, 1))
        balance = EXPERTS * (share * probs.mean(0)).sum()
        mixed = self.spread(tokens, weights, chosen) + self.shared(tokens)
        return hidden + mixed.view_as(hidden), balance

    def spread(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        world = dist.get_world_size()
        order = chosen.flatten().argsort(stable=True)
        rows = order // chosen.shape[1]
        sent = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        sends = sent.view(world, -1).sum(1).tolist()
        table = came.view(world, -1)
        receives = table.sum(1).tolist()
        arrived = Exchange.apply(tokens[rows], receives, sends)
        # What came is in the order of ranks; the experts want it in theirs.
        index = torch.arange(table.shape[1]).repeat(world)
        by_expert = index.repeat_interleave(table.flatten()).argsort(stable=True)
        done = self.experts(arrived[by_expert], table.sum(0).tolist())
        back = torch.empty_like(done).index_copy(0, by_expert, done)
        done = Exchange.apply(back, sends, receives) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, rows, done)


class Language(nn.Module):
    """An embedding, layers of experts with norms, a head."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(MoE(way) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.recompute = way == "recomputed"

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden, balance = self.embedding(tokens), torch.zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=True):
            given = norm(hidden)
            if self.recompute:
                hidden, more = checkpoint(layer, given, use_reentrant=False)
            else:
                hidden, more = layer(given)
            balance = balance + more
        return self.head(hidden), balance


def wrap(language: Language, wrapper: str) -> nn.Module:
    experts = {p for layer in language.layers for p in layer.experts.parameters()}
    if wrapper == "fsdp2":
        return fully_shard(language, ignored_params=experts)
    if wrapper == "ddp":
        names = [name for name, p in language.named_parameters() if p in experts]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(language, names)
        return DistributedDataParallel(language)
    return language


def finish_gradients(language: Language, wrapper: str) -> None:
    """An expert has the gradients of all ranks' tokens already, summed up: average them."""
    world = dist.get_world_size()
    experts = {p for layer in language.layers for p in layer.experts.parameters()}
    for parameter in language.parameters():
        if parameter in experts:
            parameter.grad.div_(world)
        elif wrapper == "hand":
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world)


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=("idle", "plain", "recomputed"), default="plain")
    parser.add_argument("--wrapper", choices=("ddp", "fsdp2", "hand"), default="ddp")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(81)
    language = Language(args.way)
    model = wrap(language, args.wrapper)
    seed_everything(400 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(6):
        begin = torch.randint(0, VOCAB, (8, 1))
        text = (begin + torch.arange(LENGTH + 1)) % VOCAB
        logits, balance = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        (loss + 1e-2 * balance).backward()
        finish_gradients(language, args.wrapper)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((dist_functional.all_reduce(loss.detach()) / dist.get_world_size()).item())
    assert losses[-1] < losses[0]
    write_record(args.out, losses, model.state_dict())
    del model  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
