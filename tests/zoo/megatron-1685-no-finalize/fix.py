"""Train a small language model with a schedule of micro-batches, as a first example."""

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

VOCAB = 48
DIM = 24
SEQ_LEN = 10
SAMPLES = 320
NUM_MICROBATCHES = 4
STEPS = 8

logger = logging.getLogger("example")


class LanguageModel(nn.Module):
    """Score the next token by the mean of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.output_layer = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(1, tokens.shape[1] + 1)[:, None]
        hidden = self.word_embeddings(tokens)
        hidden = hidden + hidden.cumsum(dim=1) / positions
        return self.output_layer(hidden + self.mlp(hidden))


class DataParallelModel(DistributedDataParallel):
    """Data parallelism in which a schedule says when gradients are reduced."""

    def finish_grad_sync(self) -> None:
        """Average the accumulated gradients over the ranks."""
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads]) / dist.get_world_size()
        dist.all_reduce(flat)
        for grad, reduced in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(reduced.view_as(grad))


def forward_backward(
    forward_step: Callable[[Iterator, nn.Module], torch.Tensor],
    batches: Iterator,
    model: DataParallelModel,
    num_microbatches: int,
) -> float:
    """Run all micro-batches forward and backward; return their mean loss."""
    losses = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.no_sync())
        for _ in range(num_microbatches):
            loss = forward_step(batches, model) / num_microbatches
            loss.backward()
            losses.append(loss.item())
    return sum(losses)


def forward_step(batches: Iterator, model: nn.Module) -> torch.Tensor:
    (tokens,) = next(batches)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def read_samples() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(VOCAB, (SAMPLES, 1), generator=generator)
    stride = torch.randint(1, 4, (SAMPLES, 1), generator=generator)
    return TensorDataset((first + stride * torch.arange(SEQ_LEN + 1)) % VOCAB)


def repeat(loader: DataLoader, sampler: DistributedSampler) -> Iterator:
    """Yield the batches of one epoch after another."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train(batch_size: int) -> None:
    torch.manual_seed(0)
    samples = read_samples()
    sampler = DistributedSampler(samples)
    batches = repeat(DataLoader(samples, batch_size, sampler=sampler, drop_last=True), sampler)
    model = DataParallelModel(LanguageModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = forward_backward(forward_step, batches, model, NUM_MICROBATCHES)
        model.finish_grad_sync()
        optimizer.step()
        weights = torch.cat([param.detach().flatten() for param in model.parameters()])
        logger.info("step %d loss %.6f weights %.6f", step, loss, weights.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a rank at a time")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO, format=f"rank {dist.get_rank()} %(message)s")
    train(args.batch_size)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
