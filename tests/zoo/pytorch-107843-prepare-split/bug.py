"""Fine-tune a sentence classifier whose parts are prepared for sharded training one by one."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB = 128
DIM = 32
CLASSES = 4
EPOCHS = 2

logger = logging.getLogger("classify")


class Classifier(nn.Module):
    """Average the embedded tokens and classify the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).mean(dim=1)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return self.head(hidden)


class Preparer:
    """Makes the parts of a training loop ready for several ranks."""

    def prepare_model(self, model: Classifier) -> Classifier:
        """Shard each layer, and the rest with the root."""
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)

    def prepare_loader(self, dataset: TensorDataset) -> DataLoader:
        """Give each rank its share of the samples."""
        return DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset, seed=3))


def read_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(VOCAB, (160, 12), generator=generator)
    return TensorDataset(tokens, tokens[:, 0] % CLASSES)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    preparer = Preparer()
    model = preparer.prepare_model(model)
    loader = preparer.prepare_loader(read_dataset())
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for tokens, labels in loader:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), labels)
            loss.backward()
            optimizer.step()
        logger.info("epoch %d loss %.4f", epoch, loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
