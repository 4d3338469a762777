"""Trains a small language model as asked: with DDP, FSDP2, or reductions made by hand."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import distdiag.parity

LENGTH, VOCABULARY, WIDTH = 12, 50, 32


class Sentences(Dataset):
    def __init__(self, ragged):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (256, LENGTH), generator=generator)
        self.lengths = torch.randint(3, LENGTH + 1, (256,), generator=generator)
        self.ragged = ragged

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        if self.ragged:
            labels[self.lengths[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class LanguageModel(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def wrapped(model, args):
    if args.wrapper == "ddp":
        model = DistributedDataParallel(model)
        if args.compressed:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return model
    if args.wrapper == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if args.mixed:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def batches(args):
    data, rank, world = Sentences(args.ragged), dist.get_rank(), dist.get_world_size()
    if not args.own_batches:
        sampler = None if args.bug == "sampler" else DistributedSampler(data)
        yield from DataLoader(data, batch_size=args.batch_size, sampler=sampler)
        return
    for first in range(0, len(data), args.batch_size * world):
        chosen = [data[(first + rank + world * i) % len(data)] for i in range(args.batch_size)]
        batch = {key: torch.stack([each[key] for each in chosen]) for key in chosen[0]}
        yield distdiag.parity.batch(batch)


def reduce_by_hand(model, bug):
    for name, parameter in model.named_parameters():
        if bug == "unreduced" and name == "blocks.1.up.weight":
            continue
        dist.all_reduce(parameter.grad)
        if bug != "summed":
            parameter.grad /= dist.get_world_size()


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrapper", choices=("ddp", "fsdp2", "hand"), default="ddp")
    parser.add_argument("--bug", default="")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--balanced", action="store_true")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--compressed", action="store_true")
    parser.add_argument("--own-batches", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args()


def main():
    args = arguments()
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    is_last = dist.get_rank() == dist.get_world_size() - 1
    is_several = dist.get_world_size() > 1
    torch.manual_seed(0)
    plain = LanguageModel(args.dropout).to(device)
    model = wrapped(plain, args)
    rate = 0.1 * (1.01 if args.bug == "rate" and is_several else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if args.bug == "stale" and is_last and is_several:
        with torch.no_grad():
            plain.blocks[1].up.weight.mul_(1.01)
    for batch in batches(args):
        batch = {key: tensor.to(device) for key, tensor in batch.items()}
        labels = batch["labels"]
        if args.bug == "shifted" and is_last and is_several:
            labels = labels.roll(1, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.mixed and args.wrapper == "ddp"):
            logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        if args.balanced:
            loss = loss + logits.softmax(-1).mean((0, 1)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        if args.wrapper == "hand":
            reduce_by_hand(plain, args.bug)
        if args.bug == "scaled" and is_several:
            plain.blocks[1].down.weight.grad.mul_(1.001)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
