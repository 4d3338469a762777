"""Trains Megatron's GPT on CPUs, with its tensors, sequences and experts split over the ranks."""

import megatron_on_cpu
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from training_record import out_parser, seed_everything, write_record

VOCAB, WIDTH, HEADS, EXPERTS, LENGTH, BATCH = 32, 16, 4, 4, 16, 4


class Norm(torch.nn.LayerNorm):
    """The norm that Megatron takes from Apex or Transformer Engine, with its mark."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def config_for(args) -> TransformerConfig:
    experts = {}
    if args.experts:
        experts = {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": args.dispatcher,
            "moe_router_load_balancing_type": args.balance,
            "moe_aux_loss_coeff": 1e-2 if "aux" in args.balance else 0.0,
            "moe_z_loss_coeff": 1e-3,
            "moe_router_enable_expert_bias": args.bias,
            "moe_router_score_function": "sigmoid" if args.bias else "softmax",
            "moe_router_pre_softmax": not args.bias,
            "moe_expert_capacity_factor": args.capacity,
            "add_bias_linear": False,
        }
    return TransformerConfig(
        num_layers=4 if args.pp > 1 else 2,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_hidden_size=32,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=torch.float32,
        sequence_parallel=args.tp > 1 and not args.whole,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1 if args.ep > 1 else args.tp,
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        calculate_per_token_loss=False,
        recompute_granularity="full" if args.recompute else None,
        recompute_method="uniform" if args.recompute else None,
        recompute_num_layers=1 if args.recompute else None,
        **experts,
    )


def model_for(args) -> DistributedDataParallel:
    config = config_for(args)
    layer = get_gpt_layer_local_spec(num_experts=EXPERTS if args.experts else None)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * 2, layer_norm=Norm),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=not args.untied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=args.overlap, use_distributed_optimizer=False
    )
    return DistributedDataParallel(config, ddp, model)


def output_of(model: DistributedDataParallel, text: Tensor) -> Tensor:
    """The losses of a text; what the next stage is given if this is not the last."""
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    positions = torch.arange(LENGTH).expand(len(text), -1)
    return model(text[:, :-1], positions, mask, labels=text[:, 1:])


def train_through_stages(model: DistributedDataParallel, text: Tensor) -> float:
    """Run Megatron's schedule over two parts of a text; the loss is that of the last stage."""
    done = get_forward_backward_func()(
        forward_step_func=lambda parts, part_of: (
            output_of(part_of, next(parts)),
            lambda losses: (losses.mean(), {"loss": losses.detach().mean()}),
        ),
        data_iterator=iter(text.chunk(2)),
        model=model,
        num_microbatches=2,
        seq_length=LENGTH,
        micro_batch_size=BATCH // 2,
        forward_only=False,
    )
    return sum(part["loss"].item() for part in done)


def train_whole(model: DistributedDataParallel, text: Tensor) -> float:
    loss = output_of(model, text).mean()
    loss.backward()
    return loss.item()


def main() -> None:
    parser = out_parser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--dispatcher", choices=("allgather", "alltoall"), default="alltoall")
    parser.add_argument("--balance", default="aux_loss")
    parser.add_argument("--capacity", type=float, default=None)
    parser.add_argument("--dropout", type=float, default=0.0)
    for option in ("bias", "experts", "overlap", "recompute", "untied", "whole"):
        parser.add_argument(f"--{option}", action="store_true")
    args = parser.parse_args()
    megatron_on_cpu.finish()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tp,
        args.pp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1 if args.ep > 1 else args.tp,
    )
    seed_everything(91)
    model_parallel_cuda_manual_seed(91)
    model = model_for(args)
    seed_everything(500 + parallel_state.get_data_parallel_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    train = train_whole if args.pp == 1 else train_through_stages
    losses = []
    for _ in range(6):
        begin = torch.randint(0, VOCAB, (BATCH, 1))
        losses.append(train(model, (begin + torch.arange(LENGTH + 1)) % VOCAB))
        finalize_model_grads([model])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad_buffer()
    assert losses[-1] < losses[0] or not parallel_state.is_pipeline_last_stage()
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
