"""The correct programs: on each of them distdiag must be silent and change nothing."""

import importlib.util
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest

from tests.integration.libraries import LIBRARY_RUNS

__all__ = ["PROGRAMS", "PROGRAM_FOLDER", "Program", "program_parameters"]

PROGRAM_FOLDER = Path(__file__).with_name("programs")


UNWATCHED = {
    "async_overlap": "a callback of a future runs here or on a thread of gloo, as it comes",
    "ddp_compile": "torch compiles nothing within modes of a program",
    "fsdp2_compile": "torch compiles nothing within modes of a program",
    "locked_cache": "the rank that takes a lock first makes what the others read",
    "own_modes": "it watches by itself, and compiles",
}
"""The programs that are run without modes around them, and why."""

UNORDERED = dict.fromkeys(
    (
        *("ddp", "ddp_variants", "expert_layers", "moe_checkpointed", "objectives"),
        *("past_the_wrapper", "sequence_classifier", "sparse_trainer"),
    ),
    "DDP comes to unused parameters in the order of their addresses",
)
"""The programs whose operations have another order in each run, and why."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One training script and its arguments.

    It runs on `nproc` ranks, where the packages that it `needs` can be imported.
    """

    name: str
    args: tuple[str, ...] = ()
    nproc: int = 2
    needs: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """Return the path of the script."""
        return PROGRAM_FOLDER / f"{self.name}.py"

    @property
    def label(self) -> str:
        """Return the name by which tests call this row."""
        reported = [arg for arg in self.args if not arg.startswith("-")]
        return "-".join(
            [self.name, *reported, *([f"{self.nproc}-ranks"] if self.nproc != 2 else [])]
        )

    @property
    def watch(self) -> tuple[str, ...]:
        """Return the option by which it records what modes of its own see, if it may."""
        if self.name in UNWATCHED:
            return ()
        return ("--watch", "any" if self.name in UNORDERED else "order")

    @property
    def records(self) -> list[str]:
        """Return the names of the records that its ranks write."""
        return [f"rank{rank}" for rank in range(self.nproc)]

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Return why it may be left out here: a package that it needs is missing."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return [pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")]


PROGRAMS = (
    Program(name="accelerate_files"),
    Program(name="accelerate_loop"),
    Program(name="actor_learner"),
    Program(name="adapters"),
    Program(name="append_logs"),
    Program(name="async_checkpoint"),
    Program(name="async_overlap"),
    Program(name="background_thread"),
    Program(name="batch_norms", args=("--way", "alike")),
    Program(name="batch_norms", args=("--way", "eight")),
    Program(name="batch_norms", args=("--way", "frozen")),
    Program(name="batch_norms", args=("--way", "points")),
    Program(name="batch_norms", args=("--way", "vectors")),
    Program(name="batches", args=("--way", "buckets")),
    Program(name="batches", args=("--way", "stream-workers")),
    Program(name="caught_exceptions"),
    Program(name="checkpoint_rotation"),
    Program(name="clipping", args=("--way", "hand-fsdp2")),
    Program(name="clipping", args=("--way", "items-fsdp2")),
    Program(name="clipping", args=("--way", "late-probe")),
    Program(name="clipping", args=("--way", "late-scalar")),
    Program(name="clipping", args=("--way", "norm-fsdp2")),
    Program(name="clipping", args=("--way", "sparse-probe")),
    Program(name="clipping", args=("--way", "value-probe")),
    Program(name="comm_hook"),
    Program(name="dataloader_workers", args=("--start-methods", "fork", "spawn")),
    Program(name="crossing_attention", args=("--way", "across-samples")),
    Program(name="crossing_attention", args=("--way", "across-texts")),
    Program(name="crossing_attention", args=("--way", "looped")),
    Program(name="crossing_attention", args=("--way", "pooled")),
    Program(name="crossing_attention", args=("--way", "pooled-sum")),
    Program(name="crossing_attention", args=("--way", "streams")),
    Program(name="crossing_attention", args=("--way", "streams-seeded")),
    Program(name="ddp"),
    Program(name="ddp_compile", args=("--backend", "aot_eager")),
    Program(name="ddp_compile", args=("--backend", "inductor")),
    Program(name="ddp_join"),
    Program(name="ddp_variants"),
    Program(name="device_mesh_2d"),
    Program(name="early_stop_agreed"),
    Program(name="fed_data", args=("--way", "by-hand")),
    Program(name="fed_data", args=("--way", "in-order")),
    Program(name="fed_data", args=("--way", "resumed")),
    Program(name="fed_data", args=("--way", "shuffled")),
    Program(name="fed_data", args=("--way", "whole")),
    Program(name="finetuning", args=("--way", "averaged")),
    Program(name="finetuning", args=("--way", "resumed")),
    Program(name="finetuning", args=("--way", "thawed")),
    Program(name="frozen_companions"),
    Program(name="fsdp1"),
    Program(name="fsdp1_orig_params", args=("--way", "flat")),
    Program(name="fsdp1_orig_params", args=("--way", "full")),
    Program(name="fsdp1_orig_params", args=("--way", "grad-op")),
    Program(name="fsdp1_orig_params", args=("--way", "hybrid")),
    Program(name="fsdp1_orig_params", args=("--way", "mixed")),
    Program(name="fsdp1_orig_params", args=("--way", "whole")),
    Program(name="fsdp2"),
    Program(name="fsdp2_compile", args=("--backend", "aot_eager")),
    Program(name="fsdp2_compile", args=("--backend", "inductor")),
    Program(name="functional_collectives"),
    Program(name="gan"),
    Program(name="gathered_evaluation", args=("--way", "by_number")),
    Program(name="gathered_evaluation", args=("--way", "cut_at_the_end")),
    Program(name="gathered_evaluation", args=("--way", "cut_the_last")),
    Program(name="gathered_evaluation", args=("--way", "for_metrics")),
    Program(name="gathered_evaluation", args=("--way", "in_training")),
    Program(name="gathered_files"),
    Program(name="gates", args=("--way", "biased")),
    Program(name="gates", args=("--way", "late")),
    Program(name="gates", args=("--way", "policy")),
    Program(name="gates", args=("--way", "seldom", "--steps", "410")),
    Program(name="gates", args=("--way", "tasks")),
    Program(name="generative", args=("--way", "diffusion-strata")),
    Program(name="generative", args=("--way", "gan")),
    Program(name="generative", args=("--way", "vae")),
    Program(name="hand_made_parallelism"),
    Program(name="hf_trainer"),
    Program(name="hub_cache"),
    Program(name="hybrid_meshes"),
    Program(name="idempotent_writes"),
    *(
        Program(
            name="ignored_experts",
            args=("--wrapper", wrapper, "--names", names),
        )
        for wrapper in ("ddp", "fsdp1", "fsdp2")
        for names in ("global", "local")
    ),
    Program(name="iterable_uneven_fixed"),
    Program(name="late_gradients"),
    Program(name="local_sgd"),
    Program(name="locked_cache"),
    Program(name="look_alikes", args=("--way", "alternate")),
    Program(name="look_alikes", args=("--way", "by-size")),
    Program(name="look_alikes", args=("--way", "layer-by-layer")),
    Program(name="look_alikes", args=("--way", "probed")),
    Program(name="look_alikes", args=("--way", "second-by-hand")),
    Program(name="look_alikes", args=("--way", "shared-images")),
    Program(name="look_alikes", args=("--way", "shared-prompts")),
    Program(name="look_alikes", args=("--way", "skipped")),
    Program(name="look_alikes", args=("--way", "variants")),
    Program(name="loss_scaling"),
    Program(name="main_process_first"),
    Program(name="marker_file"),
    Program(name="moe_all_to_all"),
    Program(name="moe_checkpointed"),
    Program(name="no_destroy"),
    Program(name="object_collectives"),
    Program(name="objectives", args=("--way", "contrast-own")),
    Program(name="objectives", args=("--way", "many-optimizers")),
    Program(name="objectives", args=("--way", "queue")),
    Program(name="odd_tensors"),
    Program(name="outer_steps"),
    Program(name="own_optimizers", args=("--way", "lbfgs")),
    Program(name="own_optimizers", args=("--way", "scaled")),
    Program(name="own_optimizers", args=("--way", "schedule-free")),
    Program(name="own_optimizers", args=("--way", "sharpness-fsdp2")),
    Program(name="own_modes", args=("--way", "eager")),
    Program(name="own_modes", args=("--way", "traced")),
    Program(name="own_parts"),
    Program(name="parameter_server"),
    Program(name="past_the_wrapper"),
    Program(name="partial_loads"),
    Program(name="path_handover"),
    Program(name="periodic_averaging"),
    Program(name="pipeline"),
    Program(name="pipeline_schedule"),
    Program(name="placed_sequences", args=("--way", "moved")),
    Program(name="placed_sequences", args=("--way", "packed")),
    Program(name="population"),
    Program(name="quantised_base", args=("--way", "subclass")),
    Program(name="rank0_extras"),
    Program(name="reinforcement", args=("--way", "grouped")),
    Program(name="reinforcement", args=("--way", "ppo")),
    Program(name="replaced_checkpoint"),
    Program(name="resumed_states"),
    Program(name="ring_attention"),
    Program(name="schedules", args=("--way", "floor")),
    Program(name="schedules", args=("--way", "one-cycle")),
    Program(name="schedules", args=("--way", "restarts")),
    Program(name="schedules", args=("--way", "staged")),
    Program(name="sequence_classifier"),
    Program(name="sharded_tables", args=("--way", "divided")),
    Program(name="sharded_tables", args=("--way", "one-optimizer")),
    Program(name="sharded_tables", args=("--way", "summed")),
    Program(name="shared_files"),
    Program(name="split_models", args=("--way", "dropout")),
    Program(name="split_models", args=("--way", "sequence")),
    Program(name="split_teacher"),
    Program(name="step_in_backward"),
    Program(name="store_order"),
    Program(name="studies", args=("--way", "averaged-late")),
    Program(name="studies", args=("--way", "ensemble")),
    Program(name="studies", args=("--way", "meta")),
    Program(name="studies", args=("--way", "normed")),
    Program(name="studies", args=("--way", "search")),
    Program(name="studies", args=("--way", "uneven")),
    Program(name="studies", args=("--way", "words")),
    Program(name="subgroups"),
    Program(name="tensor_parallel"),
    Program(name="token_weights", args=("--way", "global")),
    Program(name="token_weights", args=("--way", "global-fsdp2")),
    Program(name="token_weights", args=("--way", "masked")),
    Program(name="token_weights", args=("--way", "no-division")),
    Program(name="token_weights", args=("--way", "samples")),
    Program(name="token_weights", args=("--way", "scaled")),
    Program(name="token_weights", args=("--way", "sequences")),
    Program(name="token_weights", args=("--way", "two-losses")),
    Program(name="trainer_kinds", args=("--way", "best")),
    Program(name="trainer_kinds", args=("--way", "resume")),
    Program(name="unequal_but_legal"),
    Program(name="unreduced_on_purpose", args=("--way", "averages")),
    Program(name="unreduced_on_purpose", args=("--way", "flat")),
    Program(name="unreduced_on_purpose", args=("--way", "gossip")),
    Program(name="unreduced_on_purpose", args=("--way", "signs")),
    Program(name="unreduced_on_purpose", args=("--way", "streams")),
    Program(name="weighed_sequences", args=("--way", "literal")),
    Program(name="weighed_sequences", args=("--way", "setting")),
    Program(name="weights_of_choice", args=("--way", "two-losses")),
    Program(name="weights_of_choice", args=("--way", "weighed-shards")),
    Program(name="weights_of_choice", args=("--way", "weighed-sum")),
    Program(name="zero_redundancy"),
    *(
        Program(name=name, args=tuple(args.split()), nproc=nproc, needs=needs)
        for name, args, nproc, needs in LIBRARY_RUNS
    ),
)


def program_parameters(quick: Collection[str] = ()) -> list[object]:
    """Return each program with its launcher as pytest parameters.

    The quick form forks the ranks of all programs, or of those in `quick`; the long one runs all of
    them under torchrun, too.
    """
    return [
        pytest.param(
            program, launcher, id=f"{program.label}-{launcher}", marks=program.marks + slow
        )
        for launcher, slow in (("forked", []), ("torchrun", [pytest.mark.slow]))
        for program in PROGRAMS
        if slow or not quick or program.name in quick
    ]
