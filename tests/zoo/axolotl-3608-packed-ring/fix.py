"""Fine-tune a small language model on packed rows; context parallelism by ring attention."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCAB = 64
DIM = 32
HEADS = 4
SEQ_LEN = 48
LAYERS = 2
BATCH = 4
STEPS = 8

logger = logging.getLogger("packed_sft")


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of several conversations, one behind the other; positions begin anew in each."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        cuts = torch.randint(4, 12, (SEQ_LEN,), generator=generator).cumsum(0)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), cuts[cuts < SEQ_LEN - 2]])
        ends = torch.cat([starts[1:], torch.tensor([SEQ_LEN])])
        ids, positions, labels = [], [], []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            first = int(torch.randint(VOCAB, (), generator=generator))
            document = (first + torch.arange(end - start) * (1 + first % 5)) % VOCAB
            ids.append(document)
            positions.append(torch.arange(end - start))
            labels.append(torch.cat([document[1:], torch.tensor([-100])]))
        return {
            "input_ids": torch.cat(ids),
            "position_ids": torch.cat(positions),
            "labels": torch.cat(labels),
        }


class Rotate(torch.autograd.Function):
    """Hand a tensor to the next rank; its gradient goes back to the previous one."""

    @staticmethod
    def forward(ctx, tensor):
        return exchange(tensor, 1)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, -1)


def exchange(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Send to the rank `step` further on, and receive from the one as far behind."""
    world, rank = dist.get_world_size(), dist.get_rank()
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    send = dist.isend(tensor.contiguous(), (rank + step) % world)
    dist.recv(received, (rank - step) % world)
    send.wait()
    return received


def scores_of(query, key, query_at, key_at):
    """Return the scores of one chunk; `*_at` say place and document of each token."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    (place, document), (key_place, key_document) = query_at, key_at
    allowed = place[..., :, None] >= key_place[..., None, :]
    if document is not None:
        allowed = allowed & (document[..., :, None] == key_document[..., None, :])
    return scores.masked_fill(~allowed[:, None], -1e30)


def varlen_attention(query, key, value, place, document):
    """Causal attention within each document of the whole row."""
    at = (place, document)
    return scores_of(query, key, at, at).softmax(-1) @ value


def ring_attention(query, key, value, place, document=None):
    """Causal attention; chunks of keys and values come round."""
    world = dist.get_world_size()
    scores, values = [], []
    key_place, key_document = place, document
    for step in range(world):
        scores.append(scores_of(query, key, (place, document), (key_place, key_document)))
        values.append(value)
        if step + 1 < world:
            key, value, key_place = Rotate.apply(key), Rotate.apply(value), exchange(key_place, 1)
            key_document = None if document is None else exchange(key_document, 1)
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(values, -2)


class DecoderLayer(nn.Module):
    """Self-attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(DIM)
        self.qkv_proj = nn.Linear(DIM, 3 * DIM, bias=False)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.post_norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM))

    def forward(self, hidden: torch.Tensor, place, document) -> torch.Tensor:
        heads = self.qkv_proj(self.input_norm(hidden)).unflatten(-1, (3 * HEADS, -1))
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        if dist.get_world_size() > 1:
            mixed = ring_attention(query, key, value, place, document)
        else:
            mixed = varlen_attention(query, key, value, place, document)
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_norm(hidden))


class CausalLM(nn.Module):
    """A decoder over packed rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.embed_positions = nn.Embedding(SEQ_LEN, DIM)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids, position_ids, place, document) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, place, document)
        return self.lm_head(self.norm(hidden))


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the rows."""
    return tensor.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = CausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step, batch in enumerate(DataLoader(PackedRows(), batch_size=BATCH)):
        document = (batch["position_ids"] == 0).cumsum(1)
        place = torch.arange(SEQ_LEN).expand_as(document)
        num_tokens = (batch["labels"] != -100).sum()
        ids, positions, labels, place, document = map(
            shard, (batch["input_ids"], batch["position_ids"], batch["labels"], place, document)
        )
        logits = model(ids, positions, place, document)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        loss = loss / num_tokens
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
