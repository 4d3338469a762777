"""Trains a small language model, each token of a step weighing the same, or as is meant."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

VOCAB = 32
LENGTH = 12
MICRO_STEPS = 2
IGNORED = -100


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def micro_batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    """Draw tokens, and labels that leave out the prompts; rank 0 has long ones."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    tokens = torch.randint(VOCAB, (3, LENGTH), generator=generator)
    labels = tokens.clone()
    prompt = LENGTH - 3 - index if rank == 0 else 2 + index
    labels[:, :prompt] = IGNORED
    return tokens, labels


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)


def num_scored(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Count the tokens that all ranks score in one step."""
    count = torch.stack([(labels[:, 1:] != IGNORED).sum() for _, labels in batches]).sum()
    dist.all_reduce(count)
    return count


def token_loss(way: str, logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """Return the share of one micro-batch in the loss of a step."""
    world = dist.get_world_size()
    if way in ("global", "global-fsdp2"):
        return F.cross_entropy(*flat(logits, labels), reduction="sum") / count * world
    if way == "masked":
        mask = labels[:, 1:] != IGNORED
        chosen = labels[:, 1:].clamp(min=0).unsqueeze(-1)
        scores = logits[:, :-1].log_softmax(-1).gather(-1, chosen).squeeze(-1)
        return -(scores * mask).sum() / (count / world)
    if way == "no-division":
        return F.cross_entropy(*flat(logits, labels), reduction="sum") / count
    if way == "sequences":
        mask = (labels[:, 1:] != IGNORED).float()
        losses = F.cross_entropy(*flat(logits, labels), reduction="none").view_as(mask)
        return ((losses * mask).sum(1) / mask.sum(1)).mean() / MICRO_STEPS
    if way == "samples":
        return F.cross_entropy(logits[:, -1], labels[:, -1]) / MICRO_STEPS
    if way == "two-losses":
        close = (logits.square().mean() + logits.abs().mean()) / 2
        return (F.cross_entropy(*flat(logits, labels.clamp(min=0))) * 0.5 + close) / MICRO_STEPS
    assert way == "scaled"
    return F.cross_entropy(*flat(logits, labels.clamp(min=0))) / MICRO_STEPS


def wrapped(way: str) -> nn.Module:
    model = LanguageModel()
    if way in ("global-fsdp2", "no-division"):
        fully_shard(model)
        if way == "no-division":
            model.set_gradient_divide_factor(1.0)
            model.set_force_sum_reduction_for_comms(True)  # gloo scales nothing
        return model
    return DistributedDataParallel(model)


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", default="global")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(91)
    model = wrapped(args.way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=args.way == "scaled")
    losses = []
    for step in range(5):
        batches = [micro_batch(step, index) for index in range(MICRO_STEPS)]
        count = num_scored(batches)
        for tokens, labels in batches:
            loss = token_loss(args.way, model(tokens), labels, count)
            scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
