"""Trains with the parallel layers of Megatron alone, and splits sequences between them."""

from functools import partial

import megatron_on_cpu
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from training_record import out_parser, seed_everything, write_record

from distdiag import sequence

VOCAB, WIDTH, LENGTH = 32, 16, 16

# What comes after it in this model is done on all ranks alike: each takes its part of the gradient.
gather = partial(
    tensor_parallel.gather_from_sequence_parallel_region, tensor_parallel_output_grad=False
)


class Block(nn.Module):
    """A norm over this rank's tokens, and a feed-forward part over all of them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.norm.parameters():
            parameter.sequence_parallel = True
        kinds = {"config": config, "init_method": nn.init.xavier_normal_, "bias": True}
        self.up = tensor_parallel.ColumnParallelLinear(WIDTH, 32, gather_output=False, **kinds)
        self.down = tensor_parallel.RowParallelLinear(
            32, WIDTH, input_is_parallel=True, skip_bias_add=False, **kinds
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(self.norm(hidden))[0].relu())[0]


class Language(nn.Module):
    """A small decoder without attention: the sequence stands first, as Megatron has it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(config) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = tensor_parallel.scatter_to_sequence_parallel_region(self.embedding(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(gather(hidden))


def finish_gradients(language: Language) -> None:
    """Sum up the gradients of what each rank has used for its own tokens only."""
    marked = [p for p in language.parameters() if getattr(p, "sequence_parallel", False)]
    gradients = [parameter.grad for parameter in marked]
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=parallel_state.get_tensor_model_parallel_group())
    for gradient, total in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(total)


def main() -> None:
    args = out_parser().parse_args()
    megatron_on_cpu.finish()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    verdict = sequence.verify(
        tensor_parallel.scatter_to_sequence_parallel_region,
        gather,
        length=LENGTH,
        dim=0,
        reduction="none",
        dtypes=(torch.float32, torch.bfloat16),
    )
    verdict.raise_on_fault()
    seed_everything(92)
    tensor_parallel.model_parallel_cuda_manual_seed(92)
    language = Language(
        TransformerConfig(
            num_layers=2,
            hidden_size=WIDTH,
            num_attention_heads=4,
            tensor_model_parallel_size=dist.get_world_size(),
            sequence_parallel=True,
        )
    )
    seed_everything(600)
    optimizer = torch.optim.AdamW(language.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(6):
        begin = torch.randint(0, VOCAB, (1, 4))
        text = (begin + torch.arange(LENGTH + 1).unsqueeze(1)) % VOCAB
        logits = language(text[:-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[1:].flatten())
        loss.backward()
        finish_gradients(language)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    write_record(args.out, losses, language.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
