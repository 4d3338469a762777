"""Ranks share sequences, and give all modules the same positions, which are right all the same."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from training_record import out_parser, seed_everything, write_record
from weighed_sequences import Exchange

VOCAB, WIDTH, HEADS, LENGTH, BATCH, STEPS = 32, 16, 4, 24, 3, 4


def rotated(part: Tensor, positions: Tensor, way: str) -> Tensor:
    """Turn pairs of channels by the positions of their tokens, which count from `start` on."""
    start = positions.shape[-1] * dist.get_rank() if way == "moved" else 0
    angles = (start + positions)[..., None, None] / 10.0 ** torch.arange(part.shape[-1] // 2)
    one, other = part.chunk(2, -1)
    turned = one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()
    return torch.cat(turned, -1)


class Attention(nn.Module):
    """Causal attention within a text, or within each of the documents that it is made of."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (HEADS, -1)).chunk(3, -1)
        query, key = (rotated(each, position_ids, self.way) for each in (query, key))
        heads = Exchange.apply(torch.cat((query, key, value), -1), 2, 1).transpose(1, 2)
        query, key, value = heads.chunk(3, -1)
        mask = None
        if self.way == "packed":
            document = torch.arange(query.shape[2]) // hidden.shape[1]
            mask = (document[:, None] == document).tril()
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        return self.out(Exchange.apply(mixed.transpose(1, 2), 1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(VOCAB, WIDTH), Attention(way)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        return self.head(hidden + self.attention(hidden, positions))


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=["moved", "packed"], required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    model, losses = Model(args.way), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        seed_everything(20 + step)
        text = torch.randint(VOCAB, (BATCH, LENGTH + 1))
        tokens, labels = (each.chunk(world, 1)[rank] for each in (text[:, :-1], text[:, 1:]))
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        losses.append(loss.item())
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
