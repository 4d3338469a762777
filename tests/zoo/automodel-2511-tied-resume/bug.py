"""Train a sharded language model, save it, and go on from what was saved."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

CHECKPOINT = Path("model.pt")
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SEQ_LEN = 12
STEPS = 6

logger = logging.getLogger("language_model")


@dataclass(frozen=True)
class Config:
    """The shape of the model."""

    vocab: int = 64
    dim: int = 32
    tie_word_embeddings: bool = True


class LanguageModel(nn.Module):
    """Embed the tokens, mix each with the one before it, score the next ones."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.mix = nn.Linear(2 * config.dim, config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Score tokens with the rows that embed them."""
        if self.config.tie_word_embeddings:
            self.head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        """Draw the weights."""
        self.mix.reset_parameters()
        for matrix in (self.head, self.embed):
            nn.init.normal_(matrix.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).flatten(0, 1)
        previous = self.embed(tokens.roll(1, dims=1)).flatten(0, 1)
        hidden = hidden + torch.relu(self.mix(torch.cat([hidden, previous], dim=-1)))
        return self.head(hidden)


def build_model(config: Config) -> LanguageModel:
    """Build without memory first, then fill and shard."""
    with torch.device("meta"):
        model = LanguageModel(config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    return fully_shard(model)


def save(model: LanguageModel) -> None:
    """Write one file of all weights; a tied head needs no place in it."""
    state = get_model_state_dict(model, options=FULL)
    if model.config.tie_word_embeddings:
        state.pop("head.weight", None)
    if dist.get_rank() == 0:
        torch.save(state, CHECKPOINT)
    dist.barrier()


def load(model: LanguageModel) -> None:
    """Read the weights of all ranks from the one file."""
    state = torch.load(CHECKPOINT)
    if model.config.tie_word_embeddings:
        state["head.weight"] = state["embed.weight"]
    set_model_state_dict(model, state, options=FULL)


def train(model: LanguageModel, num_steps: int, generator: torch.Generator) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        tokens = torch.randint(model.config.vocab, (8, SEQ_LEN + 1), generator=generator)
        tokens[:, 1:] = tokens[:, :1] + torch.arange(1, SEQ_LEN + 1)
        tokens %= model.config.vocab
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    generator = torch.Generator().manual_seed(rank)
    model = build_model(Config())
    train(model, STEPS, generator)
    save(model)

    resumed = build_model(Config())
    load(resumed)
    logger.info("resumed from %s", CHECKPOINT)
    train(resumed, STEPS // 2, generator)

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
