"""Pre-train a small GPT with context parallelism beside data parallelism."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCAB = 40
DIM = 32
HEADS = 4
SEQ_LEN = 32
BATCH = 4
STEPS = 6
CONTEXT_PARALLEL = 2

logger = logging.getLogger("pretrain_gpt")


class ParallelState:
    """The groups of this rank."""

    def __init__(self) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        size = min(CONTEXT_PARALLEL, world)
        for first in range(0, world, size):
            ranks = list(range(first, first + size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.context_group = group
        for offset in range(size):
            ranks = list(range(offset, world, size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.data_group = group
        self.data_and_context_group = dist.new_group(list(range(world)))

    def size(self, *, with_context: bool) -> int:
        """Return the number of data-parallel ranks, counting those of one context or not."""
        group = self.data_and_context_group if with_context else self.data_group
        return dist.get_world_size(group)


class GatherContext(torch.autograd.Function):
    """Join keys and values of all ranks of a context; their gradients are summed."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        parts = grad.chunk(dist.get_world_size(ctx.group), dim=2)
        return parts[dist.get_rank(ctx.group)].contiguous(), None


class SelfAttention(nn.Module):
    """Causal attention of this rank's queries over the whole context."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__()
        self.group = state.context_group
        self.linear_qkv = nn.Linear(DIM, 3 * DIM)
        self.linear_proj = nn.Linear(DIM, DIM)

    def forward(self, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        heads = self.linear_qkv(hidden).unflatten(-1, (3 * HEADS, -1))
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        key, value = (GatherContext.apply(each, self.group) for each in (key, value))
        mask = places[:, None] >= torch.arange(SEQ_LEN)[None]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.linear_proj(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """One transformer layer."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, DIM)
        self.position_embeddings = nn.Embedding(SEQ_LEN, DIM)
        self.self_attention = SelfAttention(state)
        self.norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.output_layer = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        hidden = self.word_embeddings(tokens) + self.position_embeddings(places)
        hidden = hidden + self.self_attention(hidden, places)
        return self.output_layer(self.norm(hidden + self.mlp(hidden)))


class GradBuffer:
    """Averages gradients over the ranks that hold the same parameters."""

    def __init__(self, model: nn.Module, state: ParallelState) -> None:
        self.model = model
        self.group = state.data_and_context_group
        self.gradient_scaling_factor = 1.0 / state.size(with_context=True)

    def finish_grad_sync(self) -> None:
        """Scale and sum."""
        for param in self.model.parameters():
            param.grad *= self.gradient_scaling_factor
            dist.all_reduce(param.grad, group=self.group)


def loss_func(logits, labels, loss_mask, state: ParallelState) -> torch.Tensor:
    """Return the mean over the tokens of the whole context, times the ranks that share it."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    counted = torch.stack([(losses * loss_mask.flatten()).sum(), loss_mask.sum()])
    totals = counted.detach().clone()
    dist.all_reduce(totals, group=state.context_group)
    loss = counted[0] / totals[1]
    return loss * dist.get_world_size(state.context_group)


class Documents(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens; the first ones of a row are a prompt that is not learned."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(4, (SEQ_LEN + 1,), generator=generator).cumsum(0) % VOCAB
        prompt = int(torch.randint(3, 9, (), generator=generator))
        mask = (torch.arange(SEQ_LEN) >= prompt).float()
        return {"tokens": row[:-1], "labels": row[1:], "loss_mask": mask}


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    state = ParallelState()
    context_rank = dist.get_rank(state.context_group)
    context_size = dist.get_world_size(state.context_group)

    torch.manual_seed(0)
    model = GPT(state)
    buffer = GradBuffer(model, state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    sampler = torch.utils.data.DistributedSampler(
        Documents(), dist.get_world_size(state.data_group), dist.get_rank(state.data_group)
    )
    for step, batch in enumerate(DataLoader(Documents(), batch_size=BATCH, sampler=sampler)):
        part = {name: each.chunk(context_size, dim=1)[context_rank] for name, each in batch.items()}
        places = torch.arange(SEQ_LEN).chunk(context_size)[context_rank]
        logits = model(part["tokens"], places)
        loss = loss_func(logits, part["labels"], part["loss_mask"], state)
        optimizer.zero_grad()
        loss.backward()
        buffer.finish_grad_sync()
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item() / context_size)

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
