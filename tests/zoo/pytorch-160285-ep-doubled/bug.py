"""Train a small language model whose experts are spread over the ranks of a data-parallel group."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB = 64
DIM = 32
HIDDEN = 48
EXPERTS = 4
TOP_K = 2
SEQ_LEN = 12
BATCH = 4

logger = logging.getLogger("pretrain")


class Exchange(torch.autograd.Function):
    """Send rows to the ranks that hold their experts; gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        returned = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        dist.all_to_all_single(returned, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return returned, None, None, None


class Experts(nn.Module):
    """The feed-forward networks that this rank holds, their weights stacked."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.num_local = EXPERTS // group.size()
        mine = slice(group.rank() * self.num_local, (group.rank() + 1) * self.num_local)
        self.w_up = nn.Parameter((torch.randn(EXPERTS, DIM, HIDDEN) * DIM**-0.5)[mine].clone())
        self.w_down = nn.Parameter((torch.randn(EXPERTS, HIDDEN, DIM) * HIDDEN**-0.5)[mine].clone())

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        outputs = [
            nn.functional.silu(part @ self.w_up[number]) @ self.w_down[number]
            for number, part in enumerate(rows.split(counts))
        ]
        return torch.cat(outputs)


class ExpertParallelMoE(nn.Module):
    """Route each token to its best experts, on whatever rank they are."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts(group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(dim=-1).topk(TOP_K)
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // TOP_K]
        outputs = self.dispatch(rows, torch.bincount(chosen.flatten(), minlength=EXPERTS))
        weighted = outputs * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // TOP_K, weighted).view_as(hidden)

    def dispatch(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ranks, num_local = self.group.size(), self.experts.num_local
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        send = counts.view(ranks, num_local).sum(1).tolist()
        receive = arriving.view(ranks, num_local).sum(1).tolist()
        received = Exchange.apply(rows, send, receive, self.group)
        expert_of_row = torch.arange(num_local).repeat(ranks).repeat_interleave(arriving)
        by_expert = expert_of_row.argsort(stable=True)
        per_expert = arriving.view(ranks, num_local).sum(0).tolist()
        outputs = self.experts(received[by_expert], per_expert)
        outputs = torch.zeros_like(outputs).index_copy(0, by_expert, outputs)
        return Exchange.apply(outputs, receive, send, self.group)


class Block(nn.Module):
    """Attention, then a mixture of experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.moe = ExpertParallelMoE(group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(hidden)).unflatten(-1, (3, 4, -1)).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        hidden = hidden + self.proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.moe(self.norm2(hidden))


class LanguageModel(nn.Module):
    """Token embeddings, two blocks and a head."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that differ from rank to rank."""
    return {name: param for name, param in model.named_parameters() if ".experts." in name}


def train(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = LanguageModel(group)
    experts = expert_parameters(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)

    steps = torch.randint(1, 5, (128, 1), generator=torch.Generator().manual_seed(1))
    text = TensorDataset((torch.arange(SEQ_LEN + 1) * steps + torch.arange(128)[:, None]) % VOCAB)
    sampler = DistributedSampler(text, seed=2)
    for step, (tokens,) in enumerate(DataLoader(text, BATCH, sampler=sampler)):
        logits = ddp(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    train(dist.new_group(list(range(dist.get_world_size()))))
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
