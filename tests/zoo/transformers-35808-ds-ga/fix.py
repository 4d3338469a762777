"""Fine-tune a language model on answers, through an engine that accumulates gradients."""

import argparse
import contextlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB = 48
DIM = 32
NUM_SAMPLES = 256
MAX_NORM = 1.0
IGNORE = -100

logger = logging.getLogger("finetune")


class Answers(Dataset):
    """Counting sequences of different lengths; the labels leave out the prompt."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(8, 25, (1,), generator=generator))
        start, stride = torch.randint(1, 8, (2,), generator=generator)
        tokens = (start + stride * torch.arange(length)) % VOCAB
        labels = tokens.clone()
        labels[: length // 3] = IGNORE
        return tokens, labels


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens, labels = zip(*samples, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(list(tokens), batch_first=True),
        "labels": pad(list(labels), batch_first=True, padding_value=IGNORE),
    }


class LanguageModel(nn.Module):
    """A recurrent model of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mixer = nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.mixer(self.embed(tokens))
        return self.head(hidden)


class Engine:
    """Owns the replicas of a model and its optimizer; steps once in `accumulation_steps`."""

    def __init__(self, model: nn.Module, lr: float, accumulation_steps: int) -> None:
        self.module = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.accumulation_steps = accumulation_steps
        self.micro_steps = 0
        self.grad_norm = torch.zeros(())

    @property
    def at_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.accumulation_steps == 0

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        with contextlib.nullcontext() if self.at_boundary else self.module.no_sync():
            return self.module(tokens)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> None:
        """Add the gradients of the loss, which is the mean over one micro-batch if scaled."""
        if scale_wrt_gas:
            loss = loss / self.accumulation_steps
        with contextlib.nullcontext() if self.at_boundary else self.module.no_sync():
            loss.backward()

    def step(self) -> None:
        """Update the parameters if enough micro-batches were seen."""
        if self.at_boundary:
            self.grad_norm = nn.utils.clip_grad_norm_(self.module.parameters(), MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.micro_steps += 1


def group_batches(loader: DataLoader, size: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []


def count_targets(batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the number of predicted tokens in the batches of all ranks."""
    count = sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in batches)
    dist.all_reduce(count)
    return count


def compute_loss(
    engine: Engine, batch: dict[str, torch.Tensor], num_items: torch.Tensor
) -> torch.Tensor:
    """Return this batch's share of the loss; the ranks' gradients are averaged later on."""
    logits = engine(batch["input_ids"])[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    total = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return total * dist.get_world_size() / num_items


def train(batch_size: int, accumulation_steps: int) -> None:
    samples = Answers()
    sampler = DistributedSampler(samples, shuffle=True)
    loader = DataLoader(samples, batch_size=batch_size, sampler=sampler, collate_fn=collate)
    torch.manual_seed(0)
    engine = Engine(LanguageModel(), lr=0.5, accumulation_steps=accumulation_steps)
    for step, batches in enumerate(group_batches(loader, accumulation_steps)):
        num_items = count_targets(batches)
        step_loss = torch.zeros(())
        for batch in batches:
            loss = compute_loss(engine, batch, num_items)
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            step_loss += loss.detach()
        dist.all_reduce(step_loss)
        mean_loss = step_loss.item() / dist.get_world_size()
        logger.info("step %d loss %.4f grad norm %.4f", step, mean_loss, engine.grad_norm.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4, help="samples of a micro-batch")
    parser.add_argument("--accumulation-steps", type=int, default=4)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    train(args.batch_size, args.accumulation_steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
