"""Unusual objectives: contrast over all ranks, several tasks, models or optimizers."""

import copy
import itertools

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

BATCH = 4


class Gathered(torch.autograd.Function):
    """Gathers over the ranks; backward sums what the ranks have for this rank's part."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class TwoTowers(nn.Module):
    """Two encoders and a temperature."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 8))
        self.texts = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 8))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = functional.normalize(self.images(images), dim=-1)
        other = functional.normalize(self.texts(texts), dim=-1)
        return one, other, self.log_scale.exp()


def contrast(way: str, losses: list[float]) -> nn.Module:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seed_everything(40 + rank)
    for _ in range(5):
        images = torch.randn(BATCH, 8)
        texts = images + 0.3 * torch.randn(BATCH, 8)
        one, other, scale = model(images, texts)
        if way == "contrast-own":
            all_one, all_other = Gathered.apply(one), Gathered.apply(other)
            labels = torch.arange(BATCH) + rank * BATCH
            loss = functional.cross_entropy(scale * one @ all_other.T, labels)
            loss = (loss + functional.cross_entropy(scale * other @ all_one.T, labels)) / 2
        elif way == "contrast-whole":  # each rank computes the whole loss
            all_one = torch.cat(dist_nn.all_gather(one))
            all_other = torch.cat(dist_nn.all_gather(other))
            logits = scale * all_one @ all_other.T
            labels = torch.arange(BATCH * world)
            loss = functional.cross_entropy(logits, labels) + functional.cross_entropy(
                logits.T, labels
            )
        else:  # negatives of others without gradient
            parts = [torch.empty_like(other) for _ in range(world)]
            dist.all_gather(parts, other.detach())
            parts[rank] = other
            logits = scale * one @ torch.cat(parts).T
            loss = functional.cross_entropy(logits, torch.arange(BATCH) + rank * BATCH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.module.log_scale.clamp_(0, 4.6)
        losses.append(loss.item())
    return model.module


def queue(way: str, losses: list[float]) -> nn.Module:
    """A momentum encoder and a queue of keys of all ranks, with shuffled batch normalisation."""
    rank, world = dist.get_rank(), dist.get_world_size()
    query = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    key = copy.deepcopy(query).requires_grad_(False)
    model = DistributedDataParallel(query)
    keys = functional.normalize(torch.randn(8, 16), dim=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    seed_everything(41 + rank)
    place = 0
    for _ in range(4):
        images = torch.randn(8, 8)
        q = functional.normalize(model(images + 0.1 * torch.randn(8, 8)), dim=1)
        with torch.no_grad():
            for old, new in zip(key.parameters(), query.parameters(), strict=True):
                old.mul_(0.99).add_(new, alpha=0.01)
            parts = [torch.empty(8, 8) for _ in range(world)]
            dist.all_gather(parts, images + 0.1 * torch.randn(8, 8))
            shuffled = torch.randperm(8 * world)
            dist.broadcast(shuffled, src=0)
            k = functional.normalize(key(torch.cat(parts)[shuffled.view(world, -1)[rank]]), dim=1)
            parts = [torch.empty_like(k) for _ in range(world)]
            dist.all_gather(parts, k)
            k_all = torch.cat(parts)[shuffled.argsort()]
            k = k_all.view(world, 8, 8)[rank]
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ keys.clone()], dim=1)
        loss = functional.cross_entropy(logits / 0.2, torch.zeros(8, dtype=torch.long))
        keys[:, place : place + 8 * world] = k_all.T[:, : 16 - place]
        place = (place + 8 * world) % 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return query


class Tasks(nn.Module):
    """A shared body, two heads, and a learned uncertainty of each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.heads = nn.ModuleDict({"label": nn.Linear(16, 3), "depth": nn.Linear(16, 1)})
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor, labels: Tensor, depths: Tensor) -> dict[str, Tensor]:
        features = self.body(inputs).relu()
        label = functional.cross_entropy(
            self.heads["label"](features), labels, ignore_index=-1, reduction="sum"
        ) / max(len(labels), 1)
        depth = functional.l1_loss(self.heads["depth"](features).squeeze(1), depths)
        weights = (-self.log_variances).exp()
        return {
            "label": weights[0] * label,
            "depth": weights[1] * depth,
            "regulariser": self.log_variances.sum(),
        }


def tasks(way: str, losses: list[float]) -> nn.Module:
    model = DistributedDataParallel(Tasks(), find_unused_parameters=way == "tasks-alternate")
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    seed_everything(42 + dist.get_rank())
    for step in range(6):
        inputs = torch.randn(BATCH, 8)
        labels = torch.randint(0, 3, (BATCH,))
        if way == "tasks-masked":  # some samples have no label
            labels[torch.rand(BATCH) < 0.3] = -1
        parts = model(inputs, labels, inputs.sum(1))
        if way == "tasks-alternate":
            loss = parts["label" if step % 2 else "depth"] + 0.0 * parts["regulariser"]
        else:
            loss = 1.0 * parts["label"] + 0.5 * parts["depth"] + 0.1 * parts["regulariser"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.module


def one_optimizer(way: str, losses: list[float]) -> nn.Module:
    """Three models, each wrapped by itself, and one optimizer."""
    encoder = DistributedDataParallel(nn.Linear(8, 8))
    decoder = DistributedDataParallel(nn.Linear(8, 8))
    prior = nn.Embedding(4, 8)
    prior = DistributedDataParallel(prior)
    optimizer = torch.optim.Adam(
        itertools.chain(encoder.parameters(), decoder.parameters(), prior.parameters()), lr=1e-2
    )
    seed_everything(43 + dist.get_rank())
    for _ in range(5):
        inputs, kinds = torch.randn(BATCH, 8), torch.randint(0, 4, (BATCH,))
        hidden = encoder(inputs) + prior(kinds)
        loss = (decoder(hidden) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return encoder.module


def many_optimizers(way: str, losses: list[float]) -> nn.Module:
    """One model: matrices by SGD with orthogonal momentum, the rest by AdamW, sparse ones apart."""
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    wrapped = DistributedDataParallel(model)
    optimizers = [
        torch.optim.SGD([p for p in model[1:].parameters() if p.ndim == 2], lr=0.05, momentum=0.9),
        torch.optim.AdamW([p for p in model[1:].parameters() if p.ndim < 2], lr=1e-2),
        torch.optim.Adagrad(model[0].parameters(), lr=0.05),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in optimizers]
    seed_everything(44 + dist.get_rank())
    for step in range(6):
        tokens = torch.randint(0, 20, (BATCH, 5))
        loss = functional.cross_entropy(wrapped(tokens).mean(1), tokens[:, 0] % 2)
        loss.backward()
        for number, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
            if number != 2 or step % 2:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        losses.append(loss.item())
    return model


WAYS = {
    "contrast-own": contrast,
    "contrast-whole": contrast,
    "contrast-detached": contrast,
    "many-optimizers": many_optimizers,
    "one-optimizer": one_optimizer,
    "queue": queue,
    "tasks": tasks,
    "tasks-alternate": tasks,
    "tasks-masked": tasks,
}


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=sorted(WAYS), default="tasks")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    losses: list[float] = []
    model = WAYS[args.way](args.way, losses)
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
