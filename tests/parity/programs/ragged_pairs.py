"""Trains on pairs of ids and labels of unequal lengths, rightly; parts with its group at the end.

Labels that do not count are -7, which only this program knows.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, IGNORED = 12, -7


class Texts(Dataset):
    """Texts of 3 to 8 words, whose labels are the words that come next."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> Tensor:
        draw = torch.Generator().manual_seed(number)
        length = int(torch.randint(3, 9, (), generator=draw))
        return torch.randint(1, WORDS, (length + 1,), generator=draw)


def collate(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Fill the texts of one batch up to the longest of them."""
    longest = max(map(len, texts)) - 1
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    labels = torch.full((len(texts), longest), IGNORED)
    for row, text in enumerate(texts):
        ids[row, : len(text) - 1], labels[row, : len(text) - 1] = text[:-1], text[1:]
    return ids, labels


def main() -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    net = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, WORDS))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Texts()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data), collate_fn=collate)
    for step, (ids, labels) in enumerate(loader):
        total = (labels != IGNORED).sum()
        dist.all_reduce(total)
        losses = nn.functional.cross_entropy(
            model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        optimizer.zero_grad()
        (losses * dist.get_world_size() / total).backward()
        optimizer.step()
        if step + 1 == args.num_steps:
            break
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    trained = main()  # it lives on when its group is gone
