"""Pre-train a small language model on streamed text, with validation between steps."""

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

VOCAB = 64
SEQ_LEN = 16
DIM = 32
STEPS = 6
VALIDATE_EVERY = 3

logger = logging.getLogger("pretrain")


class Block(nn.Module):
    """Mix each token with the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        previous = torch.roll(hidden, 1, dims=1)
        return hidden + torch.relu(self.mix(torch.cat([hidden, previous], dim=-1)))


class LanguageModel(nn.Module):
    """Embed the tokens, mix them, predict the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.flatten(0, 1))


class TextStream(IterableDataset):
    """Pack the documents of this rank into sequences of fixed length."""

    def __init__(self, document_lengths: list[int], seed: int, repeat: bool) -> None:
        self.document_lengths = document_lengths
        self.seed = seed
        self.repeat = repeat

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        buffer: list[int] = []
        while True:
            for length in self.document_lengths:
                buffer += torch.randint(VOCAB, (length,), generator=generator).tolist()
                while len(buffer) > SEQ_LEN:
                    yield torch.tensor(buffer[: SEQ_LEN + 1])
                    buffer = buffer[SEQ_LEN:]
            if not self.repeat:
                return


class Validator:
    """Measure the loss on the validation split."""

    def __init__(self, rank: int) -> None:
        documents = [30, 120, 45, 70, 200, 64]
        lengths = documents[rank :: dist.get_world_size()]
        self.loader = DataLoader(TextStream(lengths, seed=50 + rank, repeat=False), batch_size=4)

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        model.eval()
        total = torch.zeros(2)
        for sequences in self.loader:
            total += torch.tensor([next_token_loss(model, sequences).item(), 1.0])
        dist.all_reduce(total)
        model.train()
        return (total[0] / total[1]).item()


def next_token_loss(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    logits = model(sequences[:, :-1])
    return nn.functional.cross_entropy(logits, sequences[:, 1:].flatten())


def build_model() -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = DataLoader(TextStream([40, 90, 25], seed=rank, repeat=True), batch_size=8)
    validator = Validator(rank)
    for step, sequences in zip(range(1, STEPS + 1), stream, strict=False):
        loss = next_token_loss(model, sequences)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())
        if step % VALIDATE_EVERY == 0:
            logger.info("step %d validation loss %.4f", step, validator.validate(model))

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
