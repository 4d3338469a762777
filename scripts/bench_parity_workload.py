#!/usr/bin/env python
"""The training that `bench_parity.py` times: a language model under DDP, as a user writes it."""

from __future__ import annotations

import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY, LENGTH, HEADS = 2000, 32, 8


class LanguageModel(nn.Module):
    """Embeddings, blocks of attention, a head."""

    def __init__(self, width: int, depth: int) -> None:
        """Build a model of about ``12 * depth * width ** 2`` parameters."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token."""
        return self.head(self.blocks(self.embedding(tokens)))


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel(args.width, args.depth).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (args.global_batch * 64, LENGTH + 1))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    batch_size = args.global_batch // dist.get_world_size()
    loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))
    for inputs, labels in itertools.islice(itertools.cycle(loader), args.steps):
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
