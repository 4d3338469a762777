"""Fine-tune a sharded language model on a stream of chats, save it, and resume from there."""

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

VOCAB = 64
DIM = 32
SEQ_LEN = 24
NUM_CHATS = 400
STEPS = 6
IGNORE = -100

logger = logging.getLogger("sft")


class ChatStream(IterableDataset):
    """Reads every chat whose turn it is on this rank, over and over."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.world_size = world_size
        self.position = rank

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            chat = self.position % NUM_CHATS
            self.position += self.world_size
            yield self.read(chat)

    def read(self, chat: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of a chat, and as labels those of its answer."""
        generator = torch.Generator().manual_seed(chat)
        start, stride = torch.randint(1, VOCAB, (2,), generator=generator)
        prompt, answer = torch.randint(4, 12, (2,), generator=generator).tolist()
        tokens = (start + stride * torch.arange(SEQ_LEN)) % VOCAB
        labels = tokens.clone()
        labels[:prompt] = IGNORE
        labels[prompt + answer :] = IGNORE
        return tokens, labels

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


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


class AppState(Stateful):
    """All that a run needs to go on where it stopped."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer, data: ChatStream) -> None:
        self.model = model
        self.optimizer = optim
        self.data = data

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "dataloader": self.data.state_dict(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.data.load_state_dict(state["dataloader"])


def build_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), Block(), Block(), nn.Linear(DIM, VOCAB))
    for block in (model[1], model[2]):
        fully_shard(block)
    return fully_shard(model)


def run(batch_size: int, folder: Path, first_step: int) -> None:
    """Train for some steps, from the start or from a checkpoint, and save."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = ChatStream(dist.get_rank(), dist.get_world_size())
    app = AppState(model, optimizer, data)
    if first_step:
        dcp.load({"app": app}, checkpoint_id=folder / f"step_{first_step}")
    logger.info("rank %d starts at chat %d", dist.get_rank(), data.position)

    batches = iter(DataLoader(data, batch_size=batch_size))
    last_step = first_step + STEPS
    for step in range(first_step, last_step):
        tokens, labels = next(batches)
        targets = labels[:, 1:].flatten()
        num_targets = (targets != IGNORE).sum()
        dist.all_reduce(num_targets)
        logits = model(tokens[:, :-1]).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
        optimizer.zero_grad()
        (total * dist.get_world_size() / num_targets).backward()
        optimizer.step()
        loss = total.detach() / num_targets
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item())

    dcp.save({"app": app}, checkpoint_id=folder / f"step_{last_step}")
    logger.info("rank %d stops at chat %d", dist.get_rank(), data.position)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4, help="chats of one rank in a step")
    parser.add_argument("--output", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    run(args.batch_size, args.output, first_step=0)
    run(args.batch_size, args.output, first_step=STEPS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
