"""Train a language model in two pipeline stages of two ranks, embedding and head tied."""

import logging

import torch
import torch.distributed as dist
from torch import nn

VOCAB = 48
DIM = 24
BATCH = 8
SEQ_LEN = 10
STEPS = 8

logger = logging.getLogger("pipeline")


class Stage(nn.Module):
    """One half of the model: the first embeds the tokens, the last scores them."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.word_embeddings = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.word_embeddings.weight, std=0.1)
        self.word_embeddings.weight.shared_embedding = True
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.word_embeddings(inputs) if self.is_first else inputs
        hidden = hidden + torch.tanh(self.layer(hidden))
        if self.is_first:
            return hidden
        return nn.functional.linear(hidden, self.word_embeddings.weight)


class GradientBucket:
    """Averages gradients over data-parallel ranks while the backward pass goes on."""

    def __init__(self, stage: Stage, group: dist.ProcessGroup) -> None:
        self.group = group
        self.pending: list[tuple[dist.Work, torch.Tensor, nn.Parameter]] = []
        for param in stage.parameters():
            param.register_post_accumulate_grad_hook(self.start)

    def start(self, param: nn.Parameter) -> None:
        """Begin to reduce a gradient that has just become final."""
        buffer = param.grad / self.group.size()
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        self.pending.append((work, buffer, param))

    def finish(self) -> None:
        """Wait for the averages and put them where the optimizer looks."""
        for work, buffer, param in self.pending:
            work.wait()
            param.grad.copy_(buffer)
        self.pending.clear()


class Pipeline:
    """The process groups of this rank and one training step."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        data_parallel = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        embedding = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        self.is_first = self.rank < 2
        self.peer = (self.rank + 2) % 4
        self.embedding_group = embedding[self.rank % 2]
        torch.manual_seed(self.rank // 2)
        self.stage = Stage(self.is_first)
        dist.broadcast(
            self.stage.word_embeddings.weight.data, src=self.rank % 2, group=self.embedding_group
        )
        self.bucket = GradientBucket(self.stage, data_parallel[self.rank // 2])
        self.optimizer = torch.optim.Adam(self.stage.parameters(), lr=5e-3)

    def first_stage(self, tokens: torch.Tensor) -> None:
        """Send activations on, and go back with the gradient that returns."""
        hidden = self.stage(tokens[:, :-1])
        dist.send(hidden.detach(), self.peer)
        grad = torch.empty_like(hidden)
        dist.recv(grad, self.peer)
        hidden.backward(grad)

    def last_stage(self, tokens: torch.Tensor) -> float:
        """Take the activations of the first stage and return their gradient."""
        hidden = torch.empty(BATCH, SEQ_LEN, DIM)
        dist.recv(hidden, self.peer)
        logits = self.stage(hidden.requires_grad_())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        dist.send(hidden.grad, self.peer)
        return loss.item()

    def reduce_embedding_gradient(self) -> None:
        """Add up what the first and the last stage have to say on the shared matrix."""
        for param in self.stage.parameters():
            if getattr(param, "shared_embedding", False):
                dist.all_reduce(param.grad, group=self.embedding_group)

    def train_step(self, tokens: torch.Tensor) -> float | None:
        """Run one batch forward and backward through both stages, and update this one."""
        self.optimizer.zero_grad()
        loss = self.first_stage(tokens) if self.is_first else self.last_stage(tokens)
        self.reduce_embedding_gradient()
        self.bucket.finish()
        self.optimizer.step()
        return loss


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    pipeline = Pipeline()
    generator = torch.Generator().manual_seed(pipeline.rank % 2)
    for step in range(STEPS):
        first = torch.randint(VOCAB, (BATCH, 1), generator=generator)
        tokens = (first + torch.arange(SEQ_LEN + 1)) % VOCAB
        loss = pipeline.train_step(tokens)
        if pipeline.rank == 2:
            logger.info("step %d loss %.4f", step, loss)

    if pipeline.rank == 2:
        logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
