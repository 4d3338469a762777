"""Train a mixture of experts on sequences of which each rank has a part, averaging over tokens."""

import logging

import torch
import torch.distributed as dist
from torch import nn

VOCAB = 64
DIM = 32
HIDDEN = 48
EXPERTS = 4
TOP_K = 2
SEQ_LEN = 16
BATCH = 8
STEPS = 12
AUX_COEF = 0.05

logger = logging.getLogger("trainer")


class GatherSequence(torch.autograd.Function):
    """Put the parts of all ranks together; each part gets the sum of its gradients."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class AuxLossScaler(torch.autograd.Function):
    """Pass a tensor through and start the backward pass of an auxiliary loss beside it."""

    scale = 1.0

    @staticmethod
    def forward(ctx, output, aux_loss):
        ctx.save_for_backward(aux_loss)
        return output

    @staticmethod
    def backward(ctx, grad):
        (aux_loss,) = ctx.saved_tensors
        return grad, torch.full_like(aux_loss, AuxLossScaler.scale)


class SparseMoeBlock(nn.Module):
    """A router and the feed-forward networks that it chooses from."""

    def __init__(self) -> None:
        super().__init__()
        self.aux_loss_coeff = AUX_COEF
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * HIDDEN**-0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        probs = self.gate(hidden).softmax(dim=-1)
        weights, chosen = probs.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.training:
            weights = AuxLossScaler.apply(
                weights, self.aux_loss_coeff * auxiliary_loss(probs, chosen)
            )
        mixed = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            share = (weights * (chosen == expert)).sum(dim=-1)
            where = share.nonzero(as_tuple=True)
            out = nn.functional.silu(hidden[where] @ self.up[expert]) @ self.down[expert]
            mixed = mixed.index_put(where, out * share[where].unsqueeze(1), accumulate=True)
        return mixed


def auxiliary_loss(probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Punish experts that get more of the sequences' tokens than others.

    It is summed over tokens, as the main loss is: gradients are divided by their number later.
    """
    num_tokens, ranks = probs[..., 0].numel(), dist.get_world_size()
    load = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()
    dist.all_reduce(load)
    total = (load * probs.sum(dim=(0, 1))).sum()
    loss = EXPERTS * total / (TOP_K * (num_tokens * ranks) ** 2)
    return loss * num_tokens


class Layer(nn.Module):
    """Attention, then the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.mlp = SparseMoeBlock()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.input_norm(hidden)).unflatten(-1, (3, 4, -1)).unbind(2)
        key, value = GatherSequence.apply(key), GatherSequence.apply(value)
        first = dist.get_rank() * query.shape[1]
        places = first + torch.arange(query.shape[1])
        heads = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=torch.arange(key.shape[1]) <= places[:, None],
        )
        hidden = hidden + self.o_proj(heads.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_norm(hidden))


class LanguageModel(nn.Module):
    """Token embeddings, two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden)


def average_over_tokens(model: nn.Module, num_tokens: int) -> None:
    """Sum the gradients of the ranks' parts and divide them by the number of all tokens."""
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= num_tokens


def train() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        starts = torch.randint(VOCAB, (BATCH, 1), generator=generator)
        strides = torch.randint(1, 5, (BATCH, 1), generator=generator)
        text = (starts + strides * torch.arange(SEQ_LEN + 1)) % VOCAB
        inputs, targets = (
            each.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
            for each in (text[:, :-1], text[:, 1:])
        )
        logits = model(inputs).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        average_over_tokens(model, BATCH * SEQ_LEN)
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item() / targets.numel())


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    train()
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
