"""Trains layers of experts that every rank holds whole, with each usual way to choose."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_record import out_parser, seed_everything, write_record

VOCAB, WIDTH, EXPERTS, LENGTH = 32, 16, 4, 16


class Experts(nn.Module):
    """Two products for each expert, their weights stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 32) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 32, WIDTH) / 32**0.5)

    def forward(self, hidden: Tensor, index: int) -> Tensor:
        return torch.relu(hidden @ self.up[index]) @ self.down[index]


class MoE(nn.Module):
    """A router and its experts; `balance` is the loss that evens out their load."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.balance = torch.zeros(())

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        return (hidden + self.mix(tokens).view_as(hidden)).contiguous()

    def mix(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def note_balance(self, probs: Tensor, chosen: Tensor) -> None:
        share = nn.functional.one_hot(chosen, EXPERTS).float().mean((0, 1))
        self.balance = EXPERTS * (share * probs.mean(0)).sum()

    def after_step(self) -> None:
        """Do what the layer does once for each optimizer step."""

    def weighted(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sort the tokens by their experts and drop none."""
        order = chosen.flatten().argsort(stable=True)
        rows = order // chosen.shape[1]
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        parts = tokens[rows].split(counts)
        done = torch.cat([self.experts(part, index) for index, part in enumerate(parts)])
        done = done * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, rows, done)


class Dropless(MoE):
    """Two experts for each token, scores in float32, renormalised."""

    def mix(self, tokens: Tensor) -> Tensor:
        probs = self.router(tokens).float().softmax(-1)
        weights, chosen = probs.topk(2, -1)
        self.note_balance(probs, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.weighted(tokens, weights.to(tokens.dtype), chosen)


class Switch(MoE):
    """One expert for each token, with jitter, a capacity, and tokens beyond it dropped."""

    def mix(self, tokens: Tensor) -> Tensor:
        given = tokens
        if self.training:
            given = tokens * torch.empty_like(tokens).uniform_(0.99, 1.01)
        probs = self.router(given).float().softmax(-1)
        weight, chosen = probs.max(-1)
        self.note_balance(probs, chosen.unsqueeze(1))
        capacity = int(1.25 * len(tokens) / EXPERTS)
        mask = nn.functional.one_hot(chosen, EXPERTS)
        place = (mask.cumsum(0) * mask).sum(-1) - 1
        mixed = torch.zeros_like(tokens)
        for index in range(EXPERTS):
            rows = ((chosen == index) & (place < capacity)).nonzero().flatten()
            done = self.experts(tokens[rows], index) * weight[rows].unsqueeze(1)
            mixed = mixed.index_add(0, rows, done)
        return mixed


class Choosing(MoE):
    """Each expert chooses its tokens."""

    def mix(self, tokens: Tensor) -> Tensor:
        probs = self.router(tokens).softmax(-1)
        weights, rows = probs.t().topk(2 * len(tokens) // EXPERTS, -1)
        mixed = torch.zeros_like(tokens)
        for index in range(EXPERTS):
            done = self.experts(tokens[rows[index]], index) * weights[index].unsqueeze(1)
            mixed = mixed.index_add(0, rows[index], done)
        return mixed


class Noisy(MoE):
    """Noise of a learnt size on the scores; the highest two are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Linear(WIDTH, EXPERTS, bias=False)

    def mix(self, tokens: Tensor) -> Tensor:
        logits = self.router(tokens)
        if self.training:
            size = nn.functional.softplus(self.noise(tokens)) + 0.01
            logits = logits + torch.randn_like(logits) * size
        best, chosen = logits.topk(2, -1)
        self.note_balance(logits.softmax(-1), chosen)
        return self.weighted(tokens, best.softmax(-1), chosen)


class Biased(MoE):
    """A bias takes part in the choice only; it follows the load of all ranks after each step."""

    guarded = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)

    def mix(self, tokens: Tensor) -> Tensor:
        scores = self.router(tokens).float().sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        weights = scores.gather(-1, chosen)
        is_repeated = torch._C._current_graph_task_id() != -1
        if self.training and not (self.guarded and is_repeated):
            with torch.no_grad():
                self.load.add_(torch.bincount(chosen.flatten(), minlength=EXPERTS))
        return self.weighted(tokens, weights / weights.sum(-1, keepdim=True), chosen)

    @torch.no_grad()
    def after_step(self) -> None:
        dist.all_reduce(self.load)
        step = 1e-2 * torch.sign(self.load.mean() - self.load)
        self.bias.add_(step - step.mean())
        self.load.zero_()


class Signed(Biased):
    """Counts repeated passes as well: twice the load has the same sign."""

    guarded = False


LAYERS = {
    "biased": Biased,
    "choosing": Choosing,
    "dropless": Dropless,
    "noisy": Noisy,
    "signed": Signed,
    "switch": Switch,
}


class Language(nn.Module):
    """An embedding, layers of experts with norms, a head."""

    def __init__(self, way: str, recompute: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(LAYERS[way]() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            if self.recompute == "none":
                hidden = layer(norm(hidden))
            else:
                reentrant = self.recompute == "reentrant"
                hidden = checkpoint(layer, norm(hidden), use_reentrant=reentrant)
        return self.head(hidden), torch.stack([layer.balance for layer in self.layers]).sum()


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=sorted(LAYERS), default="dropless")
    parser.add_argument("--wrapper", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--recompute", choices=("none", "reentrant", "exact"), default="none")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(51)
    language = Language(args.way, args.recompute)
    if args.wrapper == "ddp":
        # Buffers are the same on all ranks without being sent round.
        unused = args.way in ("noisy", "switch")
        model = DistributedDataParallel(
            language, broadcast_buffers=False, find_unused_parameters=unused
        )
    else:
        for layer in language.layers:
            fully_shard(layer)
        model = fully_shard(language)
    seed_everything(300 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(6):
        begin = torch.randint(0, VOCAB, (8, 1))
        text = (begin + torch.arange(LENGTH + 1)) % VOCAB
        logits, balance = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        # What a repeated pass computes anew has no gradient of its own where it is re-entrant.
        (loss if args.recompute == "reentrant" else loss + 1e-2 * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for layer in language.layers:
            layer.after_step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    write_record(args.out, losses, model.state_dict())
    del model  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
