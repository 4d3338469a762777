"""Fine-tune a small decoder; the trainer splits each row over the context-parallel ranks."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCAB = 48
DIM = 32
HEADS = 4
SEQ_LEN = 16
BATCH = 4
STEPS = 6

logger = logging.getLogger("context_parallel_trainer")


class Conversations(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens and their labels."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(7, (SEQ_LEN,), generator=generator).cumsum(0) % VOCAB
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(SEQ_LEN)}


class GatherSequence(torch.autograd.Function):
    """Join the parts of all ranks; the gradients of this rank's part are summed."""

    @staticmethod
    def forward(ctx, tensor):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()].contiguous()


class DecoderLayer(nn.Module):
    """Causal self-attention over the whole row, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(DIM)
        self.qkv_proj = nn.Linear(DIM, 3 * DIM)
        self.o_proj = nn.Linear(DIM, DIM)
        self.post_norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        heads = self.qkv_proj(self.input_norm(hidden)).unflatten(-1, (3 * HEADS, -1))
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        key, value = GatherSequence.apply(key), GatherSequence.apply(value)
        mask = position_ids[0][:, None] >= torch.arange(SEQ_LEN)[None]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_norm(hidden))


def causal_lm_loss(logits, labels, num_items_in_batch=None, shift_labels=None):
    """Return the loss of the next token; labels may have been shifted before."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), shift_labels.flatten(), ignore_index=-100, reduction="sum"
    )
    count = (shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return losses / count


class CausalLM(nn.Module):
    """A decoder with a head for the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.embed_positions = nn.Embedding(SEQ_LEN, DIM)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids, position_ids, labels=None, **kwargs) -> dict[str, torch.Tensor]:
        hidden = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_ids)
        logits = self.lm_head(hidden)
        loss = causal_lm_loss(logits, labels, kwargs.get("num_items_in_batch"))
        return {"loss": loss, "logits": logits}


def prepare(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Shift the labels, and give each rank its part of all rows."""
    batch["shift_labels"] = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    num_items = (batch["shift_labels"] != -100).sum()
    parts = {
        name: each.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()
        for name, each in batch.items()
    }
    return parts | {"num_items_in_batch": num_items}


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = CausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(DataLoader(Conversations(), batch_size=BATCH)):
        outputs = model(**prepare(batch))
        loss = outputs["loss"]
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, total.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
