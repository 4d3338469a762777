"""Train a sharded next-token model, then sample completions and compare their lengths."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

VOCAB = 24
EOS = VOCAB - 1
DIM = 32
TRAIN_STEPS = 60
MAX_NEW_TOKENS = 20

logger = logging.getLogger("sample")


class NextTokenModel(nn.Module):
    """Predict the next token from the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.block = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.block(hidden))


@torch.no_grad()
def generate(model: nn.Module, prompt: list[int]) -> list[int]:
    """Decode greedily until the end token."""
    tokens = list(prompt)
    for _ in range(MAX_NEW_TOKENS):
        logits = model(torch.tensor(tokens))
        if tokens[-1] != EOS:
            tokens.append(int(logits[-1].argmax()))
        num_unfinished = torch.tensor(int(tokens[-1] != EOS))
        dist.all_reduce(num_unfinished)
        if num_unfinished == 0:
            break
    return tokens


def train(model: nn.Module, rank: int) -> None:
    """Teach the model to count up to the end token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(TRAIN_STEPS):
        current = torch.randint(EOS, (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(current), current + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            logger.info("step %d loss %.4f", step, loss.item())


def build_model() -> NextTokenModel:
    torch.manual_seed(0)
    model = NextTokenModel()
    fully_shard(model.block)
    fully_shard(model)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    model = build_model()
    train(model, rank)
    prompts = [[12, 13], [4, 5, 6]]
    completion = generate(model, prompts[rank % len(prompts)])
    logger.info("rank %d: %s", rank, completion)

    length = torch.tensor(float(len(completion)))
    dist.all_reduce(length)
    logger.info("mean length %.1f", length.item() / dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
