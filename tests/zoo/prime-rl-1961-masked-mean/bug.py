"""Fine-tune a sharded language model on the answers of chats, with gradient accumulation."""

import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB = 64
DIM = 32
SEQ_LEN = 32
NUM_CHATS = 160

logger = logging.getLogger("sft")


class Chats(Dataset):
    """Short questions with long answers, and long documents with one-word answers."""

    def __len__(self) -> int:
        return NUM_CHATS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(VOCAB, (1,), generator=generator)
        is_document = torch.rand(1, generator=generator) < 0.5
        prompt = 28 if is_document else 6
        answer = torch.randint(1, SEQ_LEN - prompt, (1,), generator=generator)
        stride = 5 if is_document else 1
        input_ids = (start + stride * torch.arange(SEQ_LEN + 1)) % VOCAB
        positions = torch.arange(1, SEQ_LEN + 1)
        loss_mask = (positions >= prompt) & (positions < prompt + answer)
        return {"input_ids": input_ids[:-1], "target_ids": input_ids[1:], "loss_mask": loss_mask}


class Block(nn.Module):
    """Causal attention with one head, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        attend = nn.functional.scaled_dot_product_attention
        hidden = hidden + attend(query, key, value, is_causal=True)
        return hidden + self.mlp(hidden)


class LanguageModel(nn.Module):
    """Embed the tokens, mix them, predict the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build_model() -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def token_losses(model: nn.Module, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(micro_batch["input_ids"])
    targets = micro_batch["target_ids"]
    return nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[dict[str, torch.Tensor]]
) -> float:
    """Accumulate the gradients of the micro-batches, step, and return the loss of all ranks."""
    world_size = dist.get_world_size()
    grad_accum_steps = len(micro_batches)
    batch_loss = torch.zeros(())
    for micro_batch in micro_batches:
        loss = token_losses(model, micro_batch)
        loss_mask = micro_batch["loss_mask"]
        loss = loss[loss_mask].mean() / grad_accum_steps
        batch_loss += loss.detach()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(batch_loss)
    return batch_loss.item() / world_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4, help="chats of a micro-batch")
    parser.add_argument("--grad-accum-steps", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    chats = Chats()
    sampler = DistributedSampler(chats, shuffle=True, seed=1)
    loader = DataLoader(chats, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        micro_batches = []
        for micro_batch in loader:
            micro_batches.append(micro_batch)
            if len(micro_batches) < args.grad_accum_steps:
                continue
            logger.info("step %d loss %.4f", step, train_step(model, optimizer, micro_batches))
            micro_batches = []
            step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
