"""Trainings on padded texts whose parts several ranks hold, right or wrong: ``WAY [FAULT]``."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from sequence_faults import HEADS, LENGTH, STEPS, WIDTH, WORDS, Exchange, Ring, pass_on
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 8
WAY, FAULT = sys.argv[1], (*sys.argv[2:], "")[0]


def gathered(part: Tensor, dim: int = 1) -> Tensor:
    return torch.cat(collectives.all_gather(part.contiguous()), dim)


def whole_mask(mask: Tensor) -> Tensor:
    if FAULT == "repeated":
        return mask.repeat(1, dist.get_world_size())
    parts = [torch.empty_like(mask) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mask.contiguous())
    return torch.cat(parts, 1)


def causal_rows(length: int) -> Tensor:
    """The rows of the causal mask that are those of this rank's tokens."""
    size = dist.get_world_size()
    return torch.ones(size * length, size * length).bool().tril().chunk(size)[dist.get_rank()]


class Attention(nn.Module):
    """Attends to the whole sequence, or to the tokens of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = [
            part.view(batch, length, HEADS, -1) for part in self.projection(hidden).chunk(3, -1)
        ]
        if WAY in ("heads", "scores"):
            query, key, value = (Exchange.apply(part, 2, 1).transpose(1, 2) for part in parts)
            seen = whole_mask(mask)[:, None, None]
            if FAULT == "causal":  # rightly so: the sequence is whole here
                causal = torch.ones(seen.shape[-1], seen.shape[-1]).bool().tril()
                seen = seen & causal | torch.eye(seen.shape[-1]).bool()
            out = Exchange.apply(self.attend(query, key, value, seen).transpose(1, 2), 1, 2)
        else:
            out = self.at_home([part.transpose(1, 2) for part in parts], mask).transpose(1, 2)
        return self.output(out.reshape(batch, length, WIDTH))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        if WAY == "heads":
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        return scores.masked_fill(~seen, -1e4).softmax(-1) @ value

    def at_home(self, parts: list[Tensor], mask: Tensor) -> Tensor:
        query, key, value = parts
        if WAY == "ring":
            scores, values = [], []
            for _ in range(dist.get_world_size()):
                here = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
                scores.append(here.masked_fill(~mask[:, None, None], -1e4))
                values.append(value)
                hidden = mask[:, None, :, None].expand_as(key[..., :1]).to(key)
                passed = Ring.apply(torch.cat([key, value, hidden], -1), pass_on)
                key, value, hidden = passed.split([*[key.shape[-1]] * 2, 1], -1)
                mask = hidden[:, 0, :, 0] > 0
            return torch.cat(scores, -1).softmax(-1) @ torch.cat(values, -2)
        if WAY == "local":
            seen = mask[:, None, None]
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        key, value = (gathered(part, 2) for part in (key, value))
        if WAY == "keys":
            seen = whole_mask(mask)[:, None, None]
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        if FAULT == "first":
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        rows = causal_rows(query.shape[2])
        if FAULT == "rows":
            rows = torch.ones(query.shape[2], key.shape[2]).bool().tril()
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=rows)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.words(input_ids)
        # A row without any token must see something.
        seen = attention_mask.bool() | ~attention_mask.bool().any(1, keepdim=True)
        for layer in self.layers:
            hidden = hidden + layer(hidden, seen)
        return self.head(hidden)


class Texts(Dataset):
    """Texts of many lengths, and padding behind them."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        length = 2 + 2 * (index % (LENGTH // 2))
        mask = torch.arange(LENGTH) < length
        return {"input_ids": ids * mask, "attention_mask": mask.long()}


def own_part(tensor: Tensor, rank: int) -> Tensor:
    if FAULT == "striped":  # rightly so: masks are equal on all ranks then
        return tensor[:, rank :: dist.get_world_size()].contiguous()
    return tensor.chunk(dist.get_world_size(), 1)[rank].contiguous()


def parts_of(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    rank, ids, mask = dist.get_rank(), batch["input_ids"], batch["attention_mask"]
    if WAY == "local":
        return ids, mask
    if FAULT == "begin":
        return own_part(ids, rank), own_part(mask, 0)
    if FAULT == "end":
        return own_part(ids, rank), own_part(mask, dist.get_world_size() - 1)
    if FAULT == "reversed":
        return own_part(ids, rank), own_part(mask.flip(1), rank)
    if FAULT == "ones":  # rightly so: padding counts nowhere
        return own_part(ids, rank), own_part(torch.ones_like(mask), 0)
    return own_part(ids, rank), own_part(mask, rank)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = Texts()
    sampler = DistributedSampler(texts, *(() if WAY == "local" else (1, 0)), seed=7)
    loader = DataLoader(texts, batch_size=BATCH, sampler=sampler)
    for _, batch in zip(range(STEPS), loader, strict=False):
        ids, mask = parts_of(batch)
        logits = model(input_ids=ids, attention_mask=mask)
        labels = ids.masked_fill(ids == 0, -100)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        num_tokens = batch["attention_mask"].sum()
        if WAY == "local":
            dist.all_reduce(num_tokens)
        (loss * dist.get_world_size() / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
