"""Train a small language model in pipeline stages (1F1B), each stage with data parallelism."""

import argparse
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB = 48
DIM = 24
SEQ_LEN = 10
SAMPLES = 512
NUM_LAYERS = 4
NUM_MICROBATCHES = 4
STEPS = 8

logger = logging.getLogger("pipeline")


class Block(nn.Module):
    """A residual layer that mixes each token with those before."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(1, hidden.shape[1] + 1)[:, None]
        mean = hidden.cumsum(dim=1) / positions
        return hidden + self.out(torch.tanh(self.mix(hidden) + mean))


class PipelineStage(nn.Module):
    """The layers of one stage; the first stage embeds tokens, the last scores them."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Embedding(VOCAB, DIM), *(Block() for _ in range(NUM_LAYERS))]
        layers.append(nn.Linear(DIM, VOCAB))
        bounds = [round(number * len(layers) / num_stages) for number in range(num_stages + 1)]
        self.layers = nn.Sequential(*layers[bounds[stage] : bounds[stage + 1]])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class DataParallel(nn.Module):
    """Averages gradients over a group in each backward pass that is said to need it."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.require_backward_grad_sync = True
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self._reduce)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)

    def _reduce(self, param: nn.Parameter) -> None:
        if self.require_backward_grad_sync and self.group.size() > 1:
            param.grad /= self.group.size()
            dist.all_reduce(param.grad, group=self.group)


class Pipeline:
    """One stage, its neighbours, and the schedule of its micro-batches."""

    def __init__(self, pp_size: int, batch_size: int) -> None:
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // pp_size, pp_size), mesh_dim_names=("dp", "pp")
        )
        self.stage, self.num_stages = mesh["pp"].get_local_rank(), pp_size
        self.dp_rank = mesh["dp"].get_local_rank()
        self.is_first, self.is_last = self.stage == 0, self.stage == pp_size - 1
        self.shape = (batch_size, SEQ_LEN, DIM)
        module = PipelineStage(self.stage, pp_size)
        self.model = DataParallel(module, mesh["dp"].get_group())
        self.sends: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Begin to send a tensor, which lives until the end of the step."""
        self.sends.append((dist.isend(tensor, to), tensor))

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run this stage on a micro-batch; return its input, and its output or the loss."""
        if self.is_first:
            inputs = batch[:, :-1]
        else:
            inputs = torch.empty(self.shape)
            dist.recv(inputs, dist.get_rank() - 1)
            inputs.requires_grad_()
        outputs = self.model(inputs)
        if self.is_last:
            loss = nn.functional.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())
            return inputs, loss / NUM_MICROBATCHES
        self.send(outputs.detach(), dist.get_rank() + 1)
        return inputs, outputs

    def backward(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Run a micro-batch backward, between the gradients of the neighbours."""
        grad = None
        if not self.is_last:
            grad = torch.empty(self.shape)
            dist.recv(grad, dist.get_rank() + 1)
        outputs.backward(grad)
        if not self.is_first:
            self.send(inputs.grad, dist.get_rank() - 1)

    def train_step_1f1b(self, batches: Iterator[list[torch.Tensor]]) -> float:
        """Run all micro-batches, one forward and one backward in turn; return the loss."""
        num_warmup = min(self.num_stages - self.stage - 1, NUM_MICROBATCHES)
        num_steady = NUM_MICROBATCHES - num_warmup
        pending, total = [], 0.0
        for _ in range(num_warmup):
            pending.append(self.forward(*next(batches)))

        self.model.require_backward_grad_sync = False
        for number in range(num_steady):
            pending.append(self.forward(*next(batches)))
            total += pending[-1][1].sum().item() if self.is_last else 0.0
            if num_warmup == 0:
                self.model.require_backward_grad_sync = number == num_steady - 1
            self.backward(*pending.pop(0))

        for number in range(num_warmup):
            self.model.require_backward_grad_sync = number == num_warmup - 1
            self.backward(*pending.pop(0))
        for work, _ in self.sends:
            work.wait()
        self.sends.clear()
        return total


def read_batches(pipeline: Pipeline, batch_size: int) -> Iterator[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(VOCAB, (SAMPLES, 1), generator=generator)
    stride = torch.randint(1, 4, (SAMPLES, 1), generator=generator)
    samples = TensorDataset((first + stride * torch.arange(SEQ_LEN + 1)) % VOCAB)
    dp_size = dist.get_world_size() // pipeline.num_stages
    sampler = DistributedSampler(samples, dp_size, pipeline.dp_rank)
    return iter(DataLoader(samples, batch_size, sampler=sampler))


def train(pp_size: int, batch_size: int) -> None:
    pipeline = Pipeline(pp_size, batch_size)
    batches = read_batches(pipeline, batch_size)
    optimizer = torch.optim.Adam(pipeline.model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = pipeline.train_step_1f1b(batches)
        optimizer.step()
        if pipeline.is_last:
            head = pipeline.model.module.layers[-1].weight.detach().norm()
            name = f"replica {pipeline.dp_rank} step {step}"
            logger.info("%s loss %.5f norm of the head %.5f", name, loss, head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp-size", type=int, default=2, help="number of pipeline stages")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a micro-batch")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    train(args.pp_size, args.batch_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
