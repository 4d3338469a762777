"""Fine-tune a small causal language model on chats and on plain documents."""

import argparse
import logging
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB = 64
DIM = 32
IGNORED = -100
CHUNK_SIZE = 32
TEXTS = 192
ACCUMULATION_STEPS = 2

logger = logging.getLogger("finetune")

Batch = dict[str, torch.Tensor]


class Texts(Dataset):
    """Chats, of which only the answer is learnt, and documents, which are learnt as a whole."""

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 9, (), generator=generator))
        first = int(torch.randint(1, VOCAB, (), generator=generator))
        tokens = (first + torch.arange(length) * (1 + index % 3)) % (VOCAB - 1) + 1
        labels = tokens.clone()
        if index % 3 == 0:
            labels[: length // 2] = IGNORED
        return {"tokens": tokens, "labels": labels}


def collate(texts: list[Batch]) -> Batch:
    pad = nn.utils.rnn.pad_sequence
    return {
        "tokens": pad([text["tokens"] for text in texts], batch_first=True),
        "labels": pad([text["labels"] for text in texts], True, padding_value=IGNORED),
    }


class LanguageModel(nn.Module):
    """A recurrent decoder; its forward pass returns hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.decoder = nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, batch: Batch, num_items: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.decoder(self.embed(batch["tokens"]))
        return causal_loss(self.head, hidden, batch["labels"], num_items)


def causal_loss(
    head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor, num_items: torch.Tensor
) -> torch.Tensor:
    """Predict each next token, with the logits of a few tokens at a time in memory."""
    hidden, labels = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = hidden.new_zeros(())
    for states, targets in zip(hidden.split(CHUNK_SIZE), labels.split(CHUNK_SIZE), strict=True):
        logits = head(states)
        total = total + nn.functional.cross_entropy(
            logits, targets, ignore_index=IGNORED, reduction="sum"
        )
    return total / num_items


def count_items(batches: list[Batch]) -> torch.Tensor:
    """Count the tokens that all ranks learn in one optimizer step."""
    num_items = sum((batch["labels"] != IGNORED).sum() for batch in batches)
    dist.all_reduce(num_items)
    return num_items


def accumulate(loader: DataLoader) -> Iterator[list[Batch]]:
    """Group the batches of each optimizer step."""
    batches = iter(loader)
    for first in batches:
        yield [first, *(next(batches) for _ in range(ACCUMULATION_STEPS - 1))]


def train_step(model: DistributedDataParallel, batches: list[Batch]) -> torch.Tensor:
    """Accumulate the gradients of some batches; return the loss over all ranks."""
    num_items = count_items(batches)
    total = torch.zeros(())
    for batch in batches:
        loss = model(batch, num_items)
        # The wrapper averages over ranks, but the count is that of all.
        (loss * dist.get_world_size()).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total


def train(batch_size: int) -> None:
    torch.manual_seed(0)
    texts = Texts()
    sampler = DistributedSampler(texts, seed=4)
    loader = DataLoader(texts, batch_size, sampler=sampler, collate_fn=collate, drop_last=True)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, batches in enumerate(accumulate(loader)):
        optimizer.zero_grad()
        loss = train_step(model, batches)
        optimizer.step()
        logger.info("step %d loss %.4f, by chance %.4f", step, loss, math.log(VOCAB))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8, help="texts of a rank at a time")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    train(args.batch_size)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
