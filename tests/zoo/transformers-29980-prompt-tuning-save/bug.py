"""Tune a prompt encoder in front of a frozen sharded model and save only the adapter."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

DIM = 32
NUM_VIRTUAL_TOKENS = 8
NUM_CLASSES = 4
STEPS = 8
SAVE_EVERY = 4

logger = logging.getLogger("prompt_tuning")


class PromptEncoder(nn.Module):
    """Turn the indices of virtual tokens into prompt embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_VIRTUAL_TOKENS, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.embedding(indices))


class PromptTunedModel(nn.Module):
    """A frozen base that reads the learned prompt before its input."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_encoder = PromptEncoder()
        self.base = nn.Sequential(nn.Linear(DIM, 64), nn.Tanh(), nn.Linear(64, NUM_CLASSES))
        self.base.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        prompt = self.prompt_encoder(torch.arange(NUM_VIRTUAL_TOKENS))
        tokens = torch.cat([prompt.expand(len(inputs), -1, -1), inputs], dim=1)
        return self.base(tokens.mean(dim=1))

    @torch.no_grad()
    def adapter_state_dict(self) -> dict[str, torch.Tensor]:
        """Compute the prompt table, which is all that inference needs."""
        table = self.prompt_encoder(torch.arange(NUM_VIRTUAL_TOKENS))
        return {"prompt_embeddings": table.clone()}


def save_adapter(model: PromptTunedModel, folder: Path) -> None:
    """Write the adapter's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.adapter_state_dict(), folder / "adapter_model.pt")
    logger.info("saved %s", folder)


def build_model() -> PromptTunedModel:
    torch.manual_seed(0)
    model = PromptTunedModel()
    fully_shard(model.prompt_encoder)
    fully_shard(model.base)
    fully_shard(model)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    model = build_model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        inputs = torch.randn(8, 6, DIM, generator=generator)
        labels = torch.randint(NUM_CLASSES, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())
        if step % SAVE_EVERY == 0:
            if rank == 0:
                save_adapter(model, Path("adapters") / f"step-{step}")
            dist.barrier()

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
