"""Loads data in worker processes, forked and spawned, that draw random numbers of their own."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from training_record import out_parser, seed_everything, write_record


class Augmented(Dataset):
    """Samples with noise from all three generators of the worker."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return torch.full((4,), float(index)) / 32 + 0.1 * noise


def seed_worker(_worker_id: int) -> None:
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def train_epochs(model: nn.Module, start_method: str) -> list[float]:
    dataset = Augmented()
    sampler = DistributedSampler(dataset, shuffle=True, seed=5)
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=sampler,
        num_workers=2,
        worker_init_fn=seed_worker,
        multiprocessing_context=start_method,
        persistent_workers=start_method == "spawn",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def main() -> None:
    parser = out_parser()
    parser.add_argument("--start-methods", nargs="+", default=["fork", "spawn"])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(37 + dist.get_rank())
    model = DistributedDataParallel(nn.Linear(4, 1))
    losses = [loss for method in args.start_methods for loss in train_epochs(model, method)]
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
