"""Fine-tune a small network whose feed-forward layers are split over the ranks."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DIM = 32
CLASSES = 10
LAYERS = 3
STEPS = 12
MAX_NORM = 0.1

logger = logging.getLogger("finetune")


class Layer(nn.Module):
    """A feed-forward layer behind a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Classifier(nn.Module):
    """Layers between an embedding of the inputs and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def split_layers(model: Classifier, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def local_gradient(param: nn.Parameter) -> torch.Tensor:
    grad = param.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def gradient_norm(model: nn.Module) -> float:
    """Return the norm of the gradients over all ranks."""
    total = torch.zeros(())
    for param in model.parameters():
        total += local_gradient(param).square().sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def clip_gradients(model: nn.Module) -> float:
    norm = gradient_norm(model)
    factor = min(1.0, MAX_NORM / (norm + 1e-6))
    for param in model.parameters():
        local_gradient(param).mul_(factor)
    return norm


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    model = Classifier()
    split_layers(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        inputs = torch.randn(16, 16, generator=generator)
        targets = inputs[:, :CLASSES].argmax(-1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        norm = clip_gradients(model)
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f norm %.4f", step, loss.item(), norm)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
