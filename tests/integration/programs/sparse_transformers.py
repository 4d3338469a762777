"""Trains a small sparse transformer of transformers, wrapped and recomputed in several ways."""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from training_record import out_parser, seed_everything, write_record
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB, EXPERTS = 64, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mixtral(aux: bool) -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=EXPERTS, output_router_logits=aux)
    )


def olmoe(aux: bool) -> nn.Module:
    return OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=EXPERTS, output_router_logits=aux))


def qwen3(aux: bool) -> nn.Module:
    sizes = {"moe_intermediate_size": 16, "num_experts": EXPERTS, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, output_router_logits=aux))


def deepseek(_aux: bool) -> nn.Module:
    sizes = {
        "moe_intermediate_size": 16,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **sizes))


def gpt_oss(aux: bool) -> nn.Module:
    sizes = {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **sizes, output_router_logits=aux))


MODELS = {
    "deepseek": deepseek,
    "gpt-oss": gpt_oss,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen3": qwen3,
}


def saves_products(_context: object, operator: object, *_: object, **__: object) -> object:
    """Keep what matrix products return, and compute the rest anew."""
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(model: nn.Module, how: str) -> None:
    if how == "selective":
        model.config.use_cache = False
        contexts = partial(create_selective_checkpoint_contexts, saves_products)
        for layer in model.model.layers:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, context_fn=contexts
            )
    elif how != "none":
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        if how == "reentrant":
            model.enable_input_require_grads()


def wrap(model: nn.Module, how: str, *, bf16: bool) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    more = {"mp_policy": policy} if bf16 else {}
    for layer in model.model.layers:
        fully_shard(layer, **more)
    return fully_shard(model, **more)


@contextlib.contextmanager
def synchronized(model: nn.Module, whether: bool) -> Iterator[None]:
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if whether else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(whether)
        yield


def text(generator: torch.Generator) -> torch.Tensor:
    """Numbers that go up by one: something that can be learnt."""
    begin = torch.randint(3, VOCAB - 16, (4, 1), generator=generator)
    return begin + torch.arange(16)


def train(model: nn.Module, generator: torch.Generator, extras: list[str]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    parts = 2 if "accumulate" in extras else 1
    losses = []
    for step in range(6):
        for part in range(parts):
            tokens = text(generator)
            with (
                synchronized(model, part == parts - 1),
                torch.autocast("cpu", torch.bfloat16, enabled="autocast" in extras),
            ):
                loss = model(input_ids=tokens, labels=tokens).loss / parts
                loss.backward()
            losses.append(loss.item() * parts)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if "eval" in extras and step % 2 == 1:
            losses.append(evaluate(model, generator))
            model.train()
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, generator: torch.Generator) -> float:
    model.eval()
    tokens = text(generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    parser = out_parser()
    parser.add_argument("--model", choices=sorted(MODELS), default="mixtral")
    parser.add_argument("--wrapper", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument(
        "--recompute", choices=("none", "reentrant", "exact", "selective"), default="none"
    )
    parser.add_argument("--extras", nargs="*", default=[])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(31)
    model = MODELS[args.model]("aux" in args.extras).train()
    recompute(model, args.recompute)
    model = wrap(model, args.wrapper, bf16="bf16" in args.extras)
    generator = torch.Generator().manual_seed(90 + dist.get_rank())
    losses = train(model, generator, args.extras)
    assert losses[-1] < losses[0]
    write_record(args.out, losses, model.state_dict())
    del model  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
