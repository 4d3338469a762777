"""Fine-tune a classifier of short texts with accumulated gradients."""

import argparse
import logging
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

VOCAB = 80
DIM = 24
CLASSES = 3
TEXTS = 512
MAX_LEN = 12
EPOCHS = 2

logger = logging.getLogger("texts")


class TextClassifier(nn.Module):
    """Score a text by the mean of its embedded tokens; token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.hidden = nn.Linear(DIM, DIM)
        self.classifier = nn.Linear(DIM, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        lengths = (tokens != 0).sum(dim=1, keepdim=True)
        pooled = self.embed(tokens).sum(dim=1) / lengths
        return self.classifier(torch.tanh(self.hidden(pooled)))


def read_texts() -> Dataset:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(1, VOCAB, (TEXTS, MAX_LEN), generator=generator)
    lengths = torch.randint(3, MAX_LEN + 1, (TEXTS, 1), generator=generator)
    tokens[torch.arange(MAX_LEN) >= lengths] = 0
    labels = tokens[:, :3].sum(dim=1) * CLASSES // (3 * VOCAB)
    return TensorDataset(tokens, labels)


class Trainer:
    """Trains a model, one optimizer step for several micro-batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=args.accumulation_steps
        )
        set_seed(3)
        model = TextClassifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        order = torch.Generator().manual_seed(3)
        loader = DataLoader(
            read_texts(), args.batch_size, shuffle=True, drop_last=True, generator=order
        )
        prepared = self.accelerator.prepare(model, optimizer, loader)
        self.model, self.optimizer, self.loader = prepared

    def training_step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Run one micro-batch forward and backward; return its share of the reported loss."""
        loss = nn.functional.cross_entropy(self.model(tokens), labels)
        loss = loss / self.args.accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def train_epoch(self) -> Iterator[tuple[float, float]]:
        """Yield loss and gradient norm of each optimizer step."""
        total = torch.zeros(())
        for tokens, labels in self.loader:
            with self.accelerator.accumulate(self.model):
                total += self.training_step(tokens, labels)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 5.0)
                    mean = self.accelerator.reduce(total, reduction="mean")
                    yield mean.item(), norm.item()
                    total.zero_()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def train(self) -> None:
        step = 0
        for _ in range(EPOCHS):
            for loss, norm in self.train_epoch():
                logger.info("step %d loss %.4f gradient norm %.4f", step, loss, norm)
                step += 1
        del self.model, self.optimizer
        self.accelerator.free_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8, help="texts of a rank at a time")
    parser.add_argument("--accumulation-steps", type=int, default=4)
    trainer = Trainer(parser.parse_args())
    is_main = trainer.accelerator.is_main_process
    logging.basicConfig(level=logging.INFO if is_main else logging.WARNING)
    trainer.train()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
