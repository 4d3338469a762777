"""Train a draft model on blocks that start at anchors; batches without an anchor are skipped."""

import logging

import torch
import torch.distributed as dist
from torch import nn

SEQUENCE, BLOCK = 24, 8
NUM_STEPS = 10

logger = logging.getLogger("draft")


class NoValidAnchorsError(ValueError):
    """No sample of the batch is long enough for a block."""


class DraftModel(nn.Module):
    """Predicts the tokens of a block from the token before it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.head = nn.Linear(16, vocabulary)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(lengths > BLOCK).flatten()
        if not len(rows):
            raise NoValidAnchorsError("every sample is shorter than a block")
        logits = self.head(self.embedding(tokens[rows, :BLOCK]))
        targets = tokens[rows, 1 : BLOCK + 1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(32, (4, SEQUENCE), generator=generator)
    # Short chat turns gather in the shard of the second rank.
    longest = BLOCK if rank == 1 and step == 6 else SEQUENCE
    return tokens, torch.randint(3, longest + 1, (4,), generator=generator).clamp(max=longest)


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = DraftModel(vocabulary=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        tokens, lengths = make_batch(step, rank)
        optimizer.zero_grad()
        try:
            loss = model(tokens, lengths)
        except NoValidAnchorsError:
            logger.info("rank %d skips step %d", rank, step)
            continue
        loss.backward()
        average_gradients(model)
        optimizer.step()
        logger.info("rank %d step %d loss %.4f", rank, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
