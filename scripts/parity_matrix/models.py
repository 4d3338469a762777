"""The small models of the matrix, their data, and the loss of each of their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

Batch = dict[str, torch.Tensor]

NUM_SAMPLES: Final = 128
LENGTH: Final = 12
VOCABULARY: Final = 96
WIDTH: Final = 64
NUM_CLASSES: Final = 10


class Kit(NamedTuple):
    """A model with what the matrix must know of it.

    `blocks` are sharded one by one, `colwise` and `rowwise` are the layers (by the end of their
    names) that tensor parallelism splits; without any it does not apply, and `no_tp` says why.
    `layer` is the one that mutations concern. A mask is seen first inside `masked`, and what comes
    out of `layer` first by `dropped`.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Batch]
    blocks: tuple[str, ...]
    layer: str
    masked: str
    dropped: tuple[str, ...]
    colwise: tuple[str, ...] = ()
    rowwise: tuple[str, ...] = ()
    no_tp: str = ""


class Precision(NamedTuple):
    """The dtype of the parameters, and whether autocast computes in bfloat16."""

    dtype: torch.dtype
    is_mixed: bool = False

    @property
    def is_coarse(self) -> bool:
        """Whether anything is rounded to bfloat16."""
        return self.is_mixed or self.dtype is torch.bfloat16


class Samples(Dataset[Batch]):
    """Samples that a seed makes."""

    def __init__(self, kit: Kit, seed: int) -> None:
        self._tensors = kit.data(torch.Generator().manual_seed(1000 + seed))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[index] for name, tensor in self._tensors.items()}


class Mlp(nn.Module):
    """Four layers, two of which tensor parallelism can split."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        hidden = F.gelu(self.first(x))
        hidden = hidden + self.down(F.gelu(self.up(hidden)))
        return self.head(hidden)


class ConvNet(nn.Module):
    """Convolutions without normalisation over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 32)
        self.head = nn.Linear(32, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        hidden = F.relu(self.norm(self.conv(F.relu(self.stem(x)))))
        return self.head(hidden.mean((2, 3)))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=2 * LENGTH,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _vectors(generator: torch.Generator) -> Batch:
    x = torch.randn(NUM_SAMPLES, 32, generator=generator)
    return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator)}


def _images(generator: torch.Generator) -> Batch:
    x = torch.randn(NUM_SAMPLES, 3, 12, 12, generator=generator)
    return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator)}


def _sentences(generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def losses(model: Callable[..., Any], batch: Batch, precision: Precision) -> torch.Tensor:
    """Return the loss of each sample, or of each predicted token."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision.is_mixed):
        if "x" in batch:
            logits, labels = model(batch["x"].to(precision.dtype)), batch["labels"]
        else:
            tokens, mask = batch["input_ids"], batch["attention_mask"]
            logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].flatten(0, 1)
            labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits.float(), labels, reduction="none")


KITS: Final[Mapping[str, Kit]] = {
    kit.name: kit
    for kit in (
        Kit(
            name="mlp",
            build=Mlp,
            data=_vectors,
            blocks=("up", "down"),
            layer="down",
            masked="first",
            dropped=("down", "head"),
            colwise=("up",),
            rowwise=("down",),
        ),
        Kit(
            name="llama",
            build=_llama,
            data=_sentences,
            blocks=("model.layers.0", "model.layers.1"),
            layer="model.layers.1.mlp.down_proj",
            masked="model.layers.0.self_attn",
            dropped=("model.layers.1.mlp.down_proj", "model.layers.1.mlp", "model.layers.1"),
            colwise=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
            rowwise=("o_proj", "down_proj"),
        ),
        Kit(
            name="gpt2",
            build=_gpt2,
            data=_sentences,
            blocks=("transformer.h.0", "transformer.h.1"),
            layer="transformer.h.1.mlp.c_proj",
            masked="transformer.h.0.attn",
            dropped=(
                "transformer.h.1.mlp.c_proj",
                "transformer.h.1.mlp.dropout",
                "transformer.h.1.mlp",
                "transformer.h.1",
            ),
            no_tp="its layers are Conv1D, for which there is no tensor-parallel plan",
        ),
        Kit(
            name="conv",
            build=ConvNet,
            data=_images,
            blocks=("conv",),
            layer="conv",
            masked="stem",
            dropped=("conv", "norm"),
            no_tp="convolutions have no tensor-parallel plan",
        ),
    )
}

PRECISIONS: Final[Mapping[str, Precision]] = {
    "fp32": Precision(torch.float32),
    "bf16": Precision(torch.bfloat16),
    "mixed": Precision(torch.float32, is_mixed=True),
}
