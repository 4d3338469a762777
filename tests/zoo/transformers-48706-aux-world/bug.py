"""Fine-tune a mixture-of-experts model on answers, averaging their losses over all tokens."""

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
IGNORED = -100

logger = logging.getLogger("trainer")


class Conversations(Dataset):
    """Counting sequences; of each the prompt, of some length, is not learned."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        steps = torch.randint(1, 5, (size, 1), generator=generator)
        self.tokens = (torch.arange(SEQ_LEN) * steps + torch.arange(size)[:, None]) % VOCAB
        self.prompts = torch.randint(1, SEQ_LEN - 2, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: self.prompts[index]] = IGNORED
        return {"input_ids": self.tokens[index], "labels": labels}


class SparseMoeBlock(nn.Module):
    """A router and the feed-forward networks that it chooses from."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * HIDDEN**-0.5)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs = self.gate(hidden).softmax(dim=-1)
        weights, chosen = probs.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            share = (weights * (chosen == expert)).sum(dim=-1)
            where = share.nonzero(as_tuple=True)
            out = nn.functional.silu(hidden[where] @ self.up[expert]) @ self.down[expert]
            mixed = mixed.index_put(where, out * share[where].unsqueeze(1), accumulate=True)
        return mixed, auxiliary_loss(probs, chosen)


def auxiliary_loss(probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Punish sequences that crowd on some experts; the mean over the sequences."""
    load = nn.functional.one_hot(chosen, EXPERTS).sum(dim=2).float().mean(dim=1) / TOP_K
    return EXPERTS * (load * probs.mean(dim=1)).sum(dim=1).mean()


class Layer(nn.Module):
    """Attention, then the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.mlp = SparseMoeBlock()

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = self.qkv(self.input_norm(hidden)).unflatten(-1, (3, 4, -1)).unbind(2)
        heads = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        hidden = hidden + self.o_proj(heads.transpose(1, 2).flatten(2))
        mixed, aux_loss = self.mlp(self.post_norm(hidden))
        return hidden + mixed, aux_loss


class MoeForCausalLM(nn.Module):
    """A language model that returns the loss of its tokens and that of its routers."""

    def __init__(self) -> None:
        super().__init__()
        self.router_aux_loss_coef = AUX_COEF
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, aux_losses = self.embed_tokens(input_ids), []
        for layer in self.layers:
            hidden, aux_loss = layer(hidden)
            aux_losses.append(aux_loss)
        logits = self.lm_head(hidden)[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return total / num_items_in_batch, torch.stack(aux_losses).mean()


def count_items(labels: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of all ranks are learned."""
    count = (labels[:, 1:] != IGNORED).sum()
    dist.all_reduce(count)
    return count


def compute_loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch; the wrapper averages gradients, the tokens are added up."""
    lm_loss, aux_loss = model(**inputs, num_items_in_batch=count_items(inputs["labels"]))
    return (lm_loss + AUX_COEF * aux_loss) * dist.get_world_size()


def train() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(MoeForCausalLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Conversations(128)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=2))
    for step, inputs in enumerate(loader):
        loss = compute_loss(model, inputs)
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
