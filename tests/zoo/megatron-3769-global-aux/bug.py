"""Train a mixture of experts that are balanced over the tokens of all ranks."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB = 64
DIM = 32
HIDDEN = 48
EXPERTS = 4
TOP_K = 2
SEQ_LEN = 12
BATCH = 4
AUX_COEF = 0.05

logger = logging.getLogger("trainer")


class Numbers(Dataset):
    """Counting sequences."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        steps = torch.randint(1, 5, (size, 1), generator=generator)
        self.tokens = (torch.arange(SEQ_LEN + 1) * steps + torch.arange(size)[:, None]) % VOCAB

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index]


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
    """Punish experts that get more of all tokens of the step than others.

    The load is that of all ranks, the probabilities are those of this rank's tokens.
    """
    load = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()
    num_tokens = torch.tensor(probs[..., 0].numel())
    dist.all_reduce(load)
    dist.all_reduce(num_tokens)
    total = (load * probs.sum(dim=(0, 1))).sum()
    return EXPERTS * total / (TOP_K * num_tokens**2)


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
        heads = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
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


def train() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Numbers(128)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=2))
    for step, tokens in enumerate(loader):
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    train()
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
