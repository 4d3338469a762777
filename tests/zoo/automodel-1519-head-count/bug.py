"""Fine-tune a pre-trained causal model with its feed-forward layers spread over the ranks."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

VOCAB = 48
DIM = 32
HEADS = 4
LAYERS = 2
SEQ_LEN = 12
PRETRAIN_STEPS = 40
STEPS = 6

logger = logging.getLogger("finetune")


class Attention(nn.Module):
    """Causal attention with one projection for query, key and value of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv_proj = nn.Linear(DIM, 3 * DIM)
        self.out_proj = nn.Linear(DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        heads = self.qkv_proj(hidden).view(batch, length, self.num_heads, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up_proj = nn.Linear(DIM, 4 * DIM)
        self.down_proj = nn.Linear(4 * DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden)
        return hidden + self.down_proj(torch.relu(self.up_proj(hidden)))


class LanguageModel(nn.Module):
    """Embed tokens and positions, apply the layers, score the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(SEQ_LEN, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """Split the feed-forward layers; fused projections of attention stay whole on each rank."""
    return {"layers.*.up_proj": ColwiseParallel(), "layers.*.down_proj": RowwiseParallel()}


def apply_tensor_parallel(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shard the model by its plan."""
    plan = tensor_parallel_plan()
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        layer.attention.num_heads //= mesh.size()


def train(model: LanguageModel, num_steps: int, lr: float, stride: int) -> None:
    """Learn sequences that count in steps of up to `stride`; all ranks read the same batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, foreach=False)
    generator = torch.Generator().manual_seed(stride)
    for step in range(num_steps):
        start = torch.randint(VOCAB, (16, 1), generator=generator)
        strides = torch.randint(1, stride + 1, (16, 1), generator=generator)
        tokens = (start + strides * torch.arange(SEQ_LEN + 1)) % VOCAB
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    torch.manual_seed(0)
    model = LanguageModel()
    train(model, PRETRAIN_STEPS, lr=3e-3, stride=3)
    logger.info("pre-training finished")

    apply_tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model, STEPS, lr=1e-3, stride=4)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
