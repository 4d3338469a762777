"""Supervised fine-tuning with token accuracy logged over all ranks."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB = 48
DIM = 24
PAD = -100
BATCH_SIZE = 4

logger = logging.getLogger("sft")


class Conversations(Dataset):
    """Tokenised conversations; the later ones are of many lengths."""

    def __init__(self, num_samples: int = 64) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        length = 10 if index < 32 else 8 + index % 7
        return torch.randint(VOCAB, (length,), generator=generator)


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad the samples to the longest of the batch."""
    longest = max(len(sample) for sample in samples)
    input_ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full((len(samples), longest), PAD)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample)] = sample
        labels[row, : len(sample)] = sample
    return {"input_ids": input_ids, "labels": labels}


class TinyCausalModel(nn.Module):
    """A causal model of one recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.embed(input_ids))
        return self.head(hidden)


def token_accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of next tokens that were predicted, over all ranks."""
    predictions = logits[:, :-1].argmax(dim=-1)
    targets = labels[:, 1:]
    mask = targets != PAD
    correct = (predictions == targets) & mask
    counts = torch.stack([correct.sum(), mask.sum()])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    torch.manual_seed(0)
    model = DistributedDataParallel(TinyCausalModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = Conversations()
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=collate)
    for step, batch in enumerate(loader):
        logits = model(batch["input_ids"])
        shifted = logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(shifted, batch["labels"][:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        accuracy = token_accuracy(logits.detach(), batch["labels"])
        logger.info("step %d loss %.4f accuracy %.3f", step, loss.item(), accuracy)

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
