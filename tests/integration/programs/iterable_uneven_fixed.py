"""Trains on iterable shards of different length; the ranks agree when all data is used up."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from training_record import out_parser, seed_everything, write_record


class Shard(IterableDataset):
    """The samples of one rank, more of them on a higher rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(20 + 13 * self.rank):
            yield torch.randn(8, generator=generator)


def someone_has_data(batch: Tensor | None) -> bool:
    flag = torch.tensor([0 if batch is None else 1])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(31)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, num_own = [], 0
    batches = iter(DataLoader(Shard(dist.get_rank()), batch_size=4))
    while True:
        batch = next(batches, None)
        if not someone_has_data(batch):
            break
        # A rank without data takes part with a batch of zero weight.
        inputs = torch.zeros(1, 8) if batch is None else batch
        weight = 0.0 if batch is None else 1.0
        loss = weight * (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        num_own += batch is not None
    print(f"rank {dist.get_rank()} used {num_own} batches in {len(losses)} steps")
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
