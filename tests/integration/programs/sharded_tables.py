"""A recommender: tables of embeddings spread over the ranks, a dense part on each of them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

ROWS, WIDTH, BATCH, TABLES, STEPS = 50, 8, 6, (2, 1), 6


class Pooled(torch.autograd.Function):
    """Sends what this rank's tables gave for the samples of others, and takes what theirs gave."""

    @staticmethod
    def forward(ctx, pooled: Tensor, divisor: float) -> Tensor:
        ctx.divisor = divisor
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = TABLES[rank] * WIDTH * BATCH
        out = torch.empty(sum(TABLES) * WIDTH * BATCH)
        splits = [TABLES[other] * WIDTH * BATCH for other in range(world)]
        dist.all_to_all_single(out, pooled.flatten(), splits, [mine] * world)
        parts = [p.view(BATCH, -1) for p in out.split(splits)]
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = TABLES[rank] * WIDTH * BATCH
        splits = [TABLES[other] * WIDTH * BATCH for other in range(world)]
        parts = gradient.split([TABLES[other] * WIDTH for other in range(world)], 1)
        given = torch.cat([part.flatten() for part in parts])
        out = torch.empty(world * mine)
        dist.all_to_all_single(out, given, [mine] * world, splits)
        return out.view(world * BATCH, -1) / ctx.divisor, None


class SparseArch(nn.Module):
    """Looks up the rows of this rank's tables for the samples of all ranks."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES[dist.get_rank()])
        )

    def forward(self, indices: Tensor) -> Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        parts = indices.split(list(TABLES), 1)  # samples, tables, bag
        given = torch.cat([part.flatten() for part in parts])
        mine = torch.empty(world * BATCH * TABLES[rank] * indices.shape[2], dtype=torch.long)
        sizes = [part.numel() for part in parts]
        dist.all_to_all_single(mine, given, [sizes[rank]] * world, sizes)
        mine = mine.view(world * BATCH, TABLES[rank], -1)
        pooled = [table(mine[:, number]) for number, table in enumerate(self.tables)]
        return Pooled.apply(torch.cat(pooled, 1), self.divisor)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.top = nn.Sequential(nn.Linear(6 + WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, features: Tensor, pooled: Tensor) -> Tensor:
        dense = self.bottom(features)
        all_parts = torch.stack([dense, *pooled.split(WIDTH, 1)], 1)
        pairs = torch.bmm(all_parts, all_parts.transpose(1, 2))
        places = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([dense, pairs[:, places[0], places[1]]], 1))


class Recommender(nn.Module):
    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.sparse = SparseArch(divisor)
        self.dense = DistributedDataParallel(Dense())

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        return self.dense(features, self.sparse(indices))


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=("divided", "summed", "one-optimizer"), required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    model = Recommender(dist.get_world_size() if args.way == "divided" else 1.0)
    if args.way == "one-optimizer":
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05)]
    else:  # tables have an optimizer and a rate of their own
        optimizers = [
            torch.optim.Adagrad(model.sparse.parameters(), lr=0.1),
            torch.optim.Adam(model.dense.parameters(), lr=1e-2),
        ]
    seed_everything(30 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        features = torch.randn(BATCH, 4)
        indices = torch.randint(0, ROWS, (BATCH, sum(TABLES), 3))
        clicks = (indices.sum((1, 2), dtype=torch.float32) % 2)[:, None]
        logits = model(features, indices)
        loss = functional.binary_cross_entropy_with_logits(logits, clicks)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    write_record(args.out, losses, model.state_dict())
    del model  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
