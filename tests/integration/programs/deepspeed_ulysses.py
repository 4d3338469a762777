"""Trains over sequences that DeepSpeed splits: its attention layer, or its way for transformers."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.sequence.layer import DistributedAttention, single_all_to_all
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record
from transformers import LlamaConfig, LlamaForCausalLM

from distdiag import sequence

VOCAB, WIDTH, HEADS, LENGTH = 32, 16, 4, 16


def attend(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    """Causal attention over batch, sequence, heads, head size."""
    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2)


class Block(nn.Module):
    """Attention over the whole sequence, for some heads on each rank, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.attention = DistributedAttention(attend, dist.group.WORLD, 2, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = self.mix(self.norm1(hidden)).chunk(3, -1)
        q, k, v = (part.reshape(batch, length, HEADS, -1) for part in parts)
        mixed = self.attention(q, k, v, 0).reshape(batch, length, WIDTH)
        hidden = hidden + self.out(mixed)
        return hidden + self.down(self.up(self.norm2(hidden)).relu())


class Language(nn.Module):
    """A small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.place(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Llama(nn.Module):
    """A model of transformers whose attention DeepSpeed has taken over."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.llama = LlamaForCausalLM(config)
        UlyssesSPAttentionHF.register_with_transformers(
            self.llama,
            core_attn_implementation="sdpa",
            sequence_parallel_size=dist.get_world_size(),
            micro_batch_size=4,
        )

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.llama(input_ids=tokens, position_ids=positions).logits


def part_of(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class Gather(torch.autograd.Function):
    """All parts of a sequence in their order; each rank takes its own part of the gradient."""

    @staticmethod
    def forward(_ctx, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(_ctx, grad: Tensor) -> Tensor:
        return part_of(grad)


def verify() -> None:
    """Send numbered tokens through the layer of attention and its all-to-all."""
    layer = DistributedAttention(attend, dist.group.WORLD, 2, 1)
    verdict = sequence.verify(
        part_of,
        Gather.apply,
        attention=lambda query, key, value: layer(query, key, value, 0),
        length=LENGTH,
        heads=HEADS,
        hidden=8,
        causal=True,
    )
    verdict.raise_on_fault()

    def exchange(part: Tensor) -> Tensor:
        """Change heads for tokens and back again."""
        wide = single_all_to_all(part, 2, 1, 0, dist.group.WORLD)
        return single_all_to_all(wide, 1, 2, 0, dist.group.WORLD)

    part = part_of(torch.arange(float(2 * LENGTH * HEADS)).view(1, LENGTH, HEADS, 2))
    assert torch.equal(exchange(part), part)


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=("layer", "transformers", "verified"), default="layer")
    parser.add_argument("--wrapper", choices=("ddp", "fsdp2"), default="ddp")
    args = parser.parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    if args.way == "verified":
        verify()
    seed_everything(71)
    language = Llama() if args.way == "transformers" else Language()
    wrap = DistributedDataParallel if args.wrapper == "ddp" else fully_shard
    model = wrap(language)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(6):
        # All ranks draw the same text, and each takes its part of it.
        begin = torch.randint(0, VOCAB, (4, 1))
        text = (begin + torch.arange(LENGTH + 1)) % VOCAB
        positions = torch.arange(LENGTH).expand(4, -1)
        logits = model(part_of(text[:, :-1]), part_of(positions))
        targets = part_of(text[:, 1:])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    write_record(args.out, losses, model.state_dict())
    del model  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
