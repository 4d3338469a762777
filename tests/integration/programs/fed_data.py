"""Feeds ranks in the ways that are right: by samplers, by hand, whole batches in parts, resumed."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset
from training_record import out_parser, seed_everything, write_record

NUM_SAMPLES, BATCH = 64, 8


class Denoiser(nn.Module):
    """Learns to tell noise from samples, at noise levels that it draws itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))

    def forward(self, samples: Tensor) -> Tensor:
        noise, level = torch.randn_like(samples), torch.rand(len(samples), 1)
        return (self.layers(samples * (1 - level) + noise * level) - noise).square().mean()


def samples() -> Tensor:
    return torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(3))


def distributed(*, shuffle: bool) -> DataLoader:
    dataset = TensorDataset(samples())
    sampler = DistributedSampler(dataset, shuffle=shuffle)
    return DataLoader(dataset, batch_size=BATCH, sampler=sampler)


def by_hand() -> DataLoader:
    """Each rank has a data set of its own, and shuffles it as the others shuffle theirs."""
    dataset = TensorDataset(samples()[dist.get_rank() :: dist.get_world_size()])
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(1))
    return DataLoader(dataset, batch_size=BATCH, sampler=order)


def whole() -> DataLoader:
    """All ranks read the same batches, of which each takes its part."""
    order = torch.Generator().manual_seed(2)
    return DataLoader(TensorDataset(samples()), batch_size=2 * BATCH, shuffle=True, generator=order)


def train(model: nn.Module, way: str, losses: list[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=12)
    makers = {"by-hand": by_hand, "whole": whole}
    loader = makers[way]() if way in makers else distributed(shuffle=way != "in-order")
    for epoch in (0, 1, 1) if way == "resumed" else range(3):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader):
            if way == "resumed" and len(losses) >= 6 and epoch == 1 and number < 2:
                continue
            if way == "whole":
                batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            if way == "resumed" and len(losses) == 6:
                break


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", default="shuffled")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(11)
    model = DistributedDataParallel(Denoiser())
    seed_everything(12 + dist.get_rank())  # the same noise on all ranks would be half as much
    losses: list[float] = []
    train(model, args.way, losses)
    write_record(args.out, losses, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
