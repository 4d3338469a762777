"""Train a sentence classifier with a warm-up and a linear decay of the learning rate."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import get_linear_schedule_with_warmup

VOCAB = 200
CLASSES = 4
DIM = 32
NUM_SENTENCES = 128
EPOCHS = 3
WARMUP_RATIO = 0.125
LEARNING_RATE = 0.02


class Sentences(Dataset):
    """Sentences of different lengths; the most frequent range of words is the class."""

    def __len__(self) -> int:
        return NUM_SENTENCES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(5, 20, (1,), generator=generator))
        words = torch.randint(1, VOCAB, (length,), generator=generator)
        label = int(torch.bincount(words * CLASSES // VOCAB, minlength=CLASSES).argmax())
        return words, label


class Classifier(nn.Module):
    """Average the embeddings of the words and classify the result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.hidden = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        lengths = (words != 0).sum(dim=1, keepdim=True)
        pooled = self.embed(words).sum(dim=1) / lengths
        return self.head(torch.relu(self.hidden(pooled)))


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    words, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True), torch.tensor(labels)


def train(accelerator: Accelerator, batch_size: int) -> None:
    loader = accelerator.prepare(
        DataLoader(
            Sentences(), batch_size=batch_size, shuffle=True, collate_fn=collate, drop_last=True
        )
    )
    max_steps = EPOCHS * len(loader)
    scheduler_steps = max_steps * accelerator.num_processes
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=int(WARMUP_RATIO * scheduler_steps),
        num_training_steps=scheduler_steps,
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    step = 0
    for _ in range(EPOCHS):
        for words, labels in loader:
            learning_rate = scheduler.get_last_lr()[0]
            loss = nn.functional.cross_entropy(model(words), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()
            step += 1
            accelerator.print(
                f"step {step}/{max_steps} loss {mean_loss:.4f} learning rate {learning_rate:.5f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8, help="sentences of one rank in a step")
    args = parser.parse_args()

    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    set_seed(0)
    train(accelerator, args.batch_size)
    accelerator.print("training finished")
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
