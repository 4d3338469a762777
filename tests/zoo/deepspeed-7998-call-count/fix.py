"""Train a document model whose region head reads each crop of a page on its own."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

EMBED_DIM = 64
NUM_LABELS = 12
STEPS = 8

logger = logging.getLogger("document")


class RegionHead(nn.Module):
    """Classify one crop."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(EMBED_DIM, 2 * EMBED_DIM)
        self.out = nn.Linear(2 * EMBED_DIM, NUM_LABELS)

    def forward(self, crop: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.proj(crop)))


class DocumentModel(nn.Module):
    """A page encoder and a head that runs once for each crop."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(EMBED_DIM, EMBED_DIM), nn.GELU())
        self.head = RegionHead()

    def forward(self, page: torch.Tensor, crops: list[torch.Tensor]) -> torch.Tensor:
        context = self.encoder(page)
        logits = []
        for crop in crops:
            logits.append(self.head(context + crop))
        return torch.cat(logits)


def load_page(rank: int, step: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Read one page; scanned pages have figures to crop, plain ones are a single region."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    num_crops = 1 + 2 * rank if step >= 3 else 2
    page = torch.randn(1, EMBED_DIM, generator=generator)
    crops = [torch.randn(1, EMBED_DIM, generator=generator) for _ in range(num_crops)]
    labels = torch.randint(NUM_LABELS, (num_crops,), generator=generator)
    return page, crops, labels


def pad_crops(
    crops: list[torch.Tensor], labels: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Fill up with blank crops that the loss ignores, to the most crops of any rank."""
    most = torch.tensor(len(crops))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    missing = int(most) - len(crops)
    blanks = [torch.zeros(1, EMBED_DIM) for _ in range(missing)]
    return crops + blanks, nn.functional.pad(labels, (0, missing), value=-100)


def build_model() -> DocumentModel:
    torch.manual_seed(0)
    model = DocumentModel()
    fully_shard(model.encoder)
    fully_shard(model.head)
    fully_shard(model)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        page, crops, labels = load_page(rank, step)
        crops, labels = pad_crops(crops, labels)
        logits = model(page, crops)
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d crops %d loss %.4f", step, len(crops), loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
