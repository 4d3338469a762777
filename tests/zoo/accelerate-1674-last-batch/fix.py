"""Train a classifier of sensor readings and evaluate it on all ranks after each epoch."""

import argparse
import logging

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

FEATURES = 12
CLASSES = 4
TRAINING_READINGS = 256
EVALUATION_READINGS = 50
EPOCHS = 3

logger = logging.getLogger("readings")


def read_readings(num_readings: int, seed: int) -> Dataset:
    """Return readings and what caused them, the clearest readings first."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(5))
    causes = torch.randint(CLASSES, (num_readings,), generator=generator)
    noise = torch.linspace(0.2, 3.0, num_readings)[:, None]
    readings = torch.randn(num_readings, FEATURES, generator=generator) * noise
    return TensorDataset(centres[causes] + readings, causes)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def train_epoch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
) -> float:
    """Return the loss of the last batch."""
    model.train()
    for readings, causes in loader:
        loss = nn.functional.cross_entropy(model(readings), causes)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader
) -> dict[str, float | int]:
    """Return the mean loss and the accuracy over the evaluation readings of all ranks."""
    model.eval()
    losses, answers, causes_seen = [], [], []
    for readings, causes in loader:
        logits = model(readings)
        loss = nn.functional.cross_entropy(logits, causes, reduction="none")
        losses.append(accelerator.gather_for_metrics(loss))
        answer, cause = accelerator.gather_for_metrics((logits.argmax(dim=-1), causes))
        answers.append(answer)
        causes_seen.append(cause)
    right = torch.cat(answers) == torch.cat(causes_seen)
    return {
        "loss": torch.cat(losses).mean().item(),
        "accuracy": right.float().mean().item(),
        "answers": right.numel(),
    }


def train(accelerator: Accelerator, batch_size: int) -> None:
    set_seed(7)
    readings = read_readings(TRAINING_READINGS, seed=1)
    order = torch.Generator().manual_seed(7)
    shuffled = DataLoader(readings, batch_size, shuffle=True, drop_last=True, generator=order)
    evaluation = DataLoader(read_readings(EVALUATION_READINGS, seed=2), batch_size)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, training, evaluation = accelerator.prepare(
        model, optimizer, shuffled, evaluation
    )
    for epoch in range(EPOCHS):
        loss = train_epoch(accelerator, model, optimizer, training)
        metrics = evaluate(accelerator, model, evaluation)
        logger.info("epoch %d loss %.4f evaluation %s", epoch, loss, metrics)
    accelerator.free_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8, help="readings of a rank in a batch")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    logging.basicConfig(level=logging.INFO if accelerator.is_main_process else logging.WARNING)
    train(accelerator, args.batch_size)
    accelerator.end_training()


if __name__ == "__main__":
    main()
