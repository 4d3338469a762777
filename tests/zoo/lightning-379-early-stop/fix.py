"""Fit a classifier with early stopping on the validation loss."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MAX_EPOCHS = 12

logger = logging.getLogger("fit")


class EarlyStopping:
    """Stop when the monitored value has not improved for `patience` epochs."""

    def __init__(self, patience: int, min_delta: float) -> None:
        self.patience = patience
        self.min_delta = min_delta
        self.best = float("inf")
        self.num_bad_epochs = 0

    def should_stop(self, value: float) -> bool:
        if value < self.best - self.min_delta:
            self.best = value
            self.num_bad_epochs = 0
        else:
            self.num_bad_epochs += 1
        return self.num_bad_epochs >= self.patience


def make_dataset(num_samples: int, seed: int, label_noise: float) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_samples, 16, generator=generator)
    labels = (features[:, :4].sum(dim=1) > 0).long()
    flipped = torch.rand(num_samples, generator=generator) < label_noise
    return TensorDataset(features, torch.where(flipped, 1 - labels, labels))


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader) -> torch.Tensor:
    """Return the mean loss over the validation loader."""
    model.eval()
    losses = [nn.functional.cross_entropy(model(x), y) for x, y in loader]
    model.train()
    return torch.stack(losses).mean()


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    for features, labels in loader:
        loss = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    train_set = make_dataset(256, seed=1, label_noise=0.0)
    sampler = DistributedSampler(train_set, world_size, rank, seed=0)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    # Every rank validates on its own file; annotators agree less on the later ones.
    val_set = make_dataset(128, seed=10 + rank, label_noise=0.45 * rank)
    val_loader = DataLoader(val_set, batch_size=64)

    stopper = EarlyStopping(patience=2, min_delta=5e-3)
    history = []
    for epoch in range(MAX_EPOCHS):
        sampler.set_epoch(epoch)
        train_loss = train_epoch(model, train_loader, optimizer)
        val_loss = validate(net, val_loader)
        dist.all_reduce(val_loss)
        val_loss /= world_size
        history.append(val_loss.item())
        logger.info("rank %d epoch %d train %.4f val %.4f", rank, epoch, train_loss, val_loss)
        if stopper.should_stop(val_loss.item()):
            logger.info("rank %d: early stopping at epoch %d", rank, epoch)
            break

    histories = [None] * world_size
    dist.all_gather_object(histories, history)
    logger.info("rank %d: training finished, best losses %s", rank, [min(h) for h in histories])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
