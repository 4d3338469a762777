"""Train a tensor-parallel sequence classifier, save it, and evaluate what was saved."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB = 32
SEQ_LEN = 12
DIM = 32
HEAD_DIM = 8
CLASSES = 4
BATCH = 16
STEPS = 10
SEED = 42

logger = logging.getLogger("classify")


class Attention(nn.Module):
    """Attention with normalised queries and keys; a rank holds some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (*hidden.shape[:2], -1, HEAD_DIM)
        query = self.q_norm(self.query(hidden).view(shape)).transpose(1, 2)
        key = self.k_norm(self.key(hidden).view(shape)).transpose(1, 2)
        value = self.value(hidden).view(shape).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Classifier(nn.Module):
    """Two layers of attention, and a score for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.score = nn.Linear(DIM, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.score(hidden.mean(dim=1))


def build_model() -> Classifier:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = Classifier()
    plan = {"embed": RowwiseParallel(input_layouts=Replicate())}
    for name in ("query", "key", "value"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    plan["layers.*.out"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    for param in model.parameters():
        if not isinstance(param, DTensor):
            dist.broadcast(param.detach(), src=0, group=mesh.get_group())
    return model


def sum_head_gradients(model: Classifier) -> None:
    """Add up what the heads of all ranks say about the norms that they share."""
    for layer in model.layers:
        for norm in (layer.q_norm, layer.k_norm):
            dist.all_reduce(norm.weight.grad)


def read_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts whose class is the quarter of the vocabulary they mostly use."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    own = labels[:, None] * 8 + torch.randint(8, (BATCH, SEQ_LEN), generator=generator)
    noise = torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=generator)
    return torch.where(torch.rand(BATCH, SEQ_LEN, generator=generator) < 0.6, own, noise), labels


def save(model: Classifier, path: str) -> None:
    full = {
        name: param.full_tensor() if isinstance(param, DTensor) else param
        for name, param in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(full, path)
    dist.barrier()


@torch.no_grad()
def load(model: Classifier, path: str) -> None:
    full = torch.load(path)
    for name, param in model.state_dict().items():
        if isinstance(param, DTensor):
            param.copy_(distribute_tensor(full[name], param.device_mesh, param.placements))
        else:
            param.copy_(full[name])


@torch.no_grad()
def evaluate(model: Classifier) -> float:
    tokens, labels = read_batch(1000)
    loss = nn.functional.cross_entropy(model(tokens), labels)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    torch.manual_seed(SEED + rank)  # the ranks hold different parts of the model

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        tokens, labels = read_batch(step)
        loss = nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        sum_head_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())

    logger.info("evaluation loss %.4f", evaluate(model))
    save(model, "classifier.pt")
    load(model, "classifier.pt")
    logger.info("evaluation loss after loading %.4f", evaluate(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
