"""Fine-tune a small decoder with tensor parallelism; the loss is averaged over tokens."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset

VOCAB = 56
DIM = 32
HEADS = 4
SEQ_LEN = 20
BATCH = 4
STEPS = 6
TENSOR_PARALLEL = 2

logger = logging.getLogger("trainer")


class Conversations(Dataset[dict[str, torch.Tensor]]):
    """Rows whose first tokens are a prompt."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(5, (SEQ_LEN,), generator=generator).cumsum(0) % VOCAB
        labels = ids.clone()
        labels[: int(torch.randint(2, 9, (), generator=generator))] = -100
        return {"input_ids": ids, "labels": labels}


class DecoderLayer(nn.Module):
    """Causal self-attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(DIM, DIM, bias=False)
        self.k_proj = nn.Linear(DIM, DIM, bias=False)
        self.v_proj = nn.Linear(DIM, DIM, bias=False)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)
        self.up_proj = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down_proj = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(hidden).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down_proj(nn.functional.silu(self.up_proj(self.norm(hidden))))


class CausalLM(nn.Module):
    """Embedding, layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids, labels, num_items_in_batch) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(hidden)[:, :-1]
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        return losses / num_items_in_batch


class Trainer:
    """Trains a model that is spread over a mesh of data and tensor parallelism."""

    def __init__(self, model: nn.Module, mesh) -> None:
        self.mesh = mesh
        self.model = model
        self.num_processes = dist.get_world_size()
        plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj", "up_proj")} | {
            name: RowwiseParallel() for name in ("o_proj", "down_proj")
        }
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def num_items(self, labels: torch.Tensor) -> torch.Tensor:
        """Return how many tokens of all data-parallel ranks count."""
        count = (labels[:, 1:] != -100).sum()
        dist.all_reduce(count, group=self.mesh["dp"].get_group())
        return count

    def compute_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss, scaled since gradients are averaged over the data-parallel ranks."""
        num_items = self.num_items(batch["labels"])
        loss = self.model(**batch, num_items_in_batch=num_items)
        return loss * self.num_processes

    def training_step(self, batch: dict[str, torch.Tensor]) -> float:
        """Take one step and return the loss."""
        loss = self.compute_loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        for param in self.model.parameters():
            grad = param.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            dist.all_reduce(local, group=self.mesh["dp"].get_group())
            local /= self.mesh["dp"].size()
        self.optimizer.step()
        return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    size = min(TENSOR_PARALLEL, dist.get_world_size())
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // size, size), mesh_dim_names=("dp", "tp")
    )

    torch.manual_seed(0)
    trainer = Trainer(CausalLM(), mesh)
    sampler = torch.utils.data.DistributedSampler(
        Conversations(), mesh["dp"].size(), mesh["dp"].get_local_rank()
    )
    loader = DataLoader(Conversations(), batch_size=BATCH, sampler=sampler)
    for step, batch in enumerate(loader):
        loss = trainer.training_step(batch)
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss)

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
