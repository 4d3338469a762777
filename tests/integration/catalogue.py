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
    """One training script, its arguments, and whether only the long run includes it.

    It runs on `nproc` ranks, where the packages that it `needs` can be imported.
    """

    name: str
    args: tuple[str, ...] = ()
    slow: bool = False
    nproc: int = 2
    needs: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """Return the path of the script."""
        return PROGRAM_FOLDER / f"{self.name}.py"

    @property
    def label(self) -> str:
        """Return the name by which tests call this row."""
        told = [arg for arg in self.args if not arg.startswith("-")]
        return "-".join([self.name, *told, *([f"{self.nproc}-ranks"] if self.nproc != 2 else [])])

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
    Program(name="accelerate_files", slow=True),
    Program(name="accelerate_loop", slow=True),
    Program(name="actor_learner", slow=True),
    Program(name="adapters", slow=True),
    Program(name="append_logs", slow=True),
    Program(name="async_checkpoint", slow=True),
    Program(name="async_overlap"),
    Program(name="background_thread", slow=True),
    Program(name="batch_norms", args=("--way", "alike"), slow=True),
    Program(name="batch_norms", args=("--way", "eight"), slow=True),
    Program(name="batch_norms", args=("--way", "frozen"), slow=True),
    Program(name="batch_norms", args=("--way", "points"), slow=True),
    Program(name="batch_norms", args=("--way", "vectors"), slow=True),
    Program(name="batches", args=("--way", "buckets"), slow=True),
    Program(name="batches", args=("--way", "stream-workers"), slow=True),
    Program(name="caught_exceptions", slow=True),
    Program(name="checkpoint_rotation", slow=True),
    Program(name="clipping", args=("--way", "hand-fsdp2"), slow=True),
    Program(name="clipping", args=("--way", "items-fsdp2"), slow=True),
    Program(name="clipping", args=("--way", "late-probe"), slow=True),
    Program(name="clipping", args=("--way", "late-scalar"), slow=True),
    Program(name="clipping", args=("--way", "norm-fsdp2"), slow=True),
    Program(name="clipping", args=("--way", "sparse-probe"), slow=True),
    Program(name="clipping", args=("--way", "value-probe"), slow=True),
    Program(name="comm_hook", slow=True),
    Program(name="dataloader_workers", args=("--start-methods", "fork", "spawn"), slow=True),
    Program(name="crossing_attention", args=("--way", "across-samples"), slow=True),
    Program(name="crossing_attention", args=("--way", "across-texts"), slow=True),
    Program(name="crossing_attention", args=("--way", "looped"), slow=True),
    Program(name="crossing_attention", args=("--way", "pooled"), slow=True),
    Program(name="crossing_attention", args=("--way", "pooled-sum"), slow=True),
    Program(name="crossing_attention", args=("--way", "streams"), slow=True),
    Program(name="crossing_attention", args=("--way", "streams-seeded"), slow=True),
    Program(name="ddp"),
    Program(name="ddp_compile", args=("--backend", "aot_eager")),
    Program(name="ddp_compile", args=("--backend", "inductor"), slow=True),
    Program(name="ddp_join"),
    Program(name="ddp_variants", slow=True),
    Program(name="device_mesh_2d", slow=True),
    Program(name="early_stop_agreed", slow=True),
    Program(name="fed_data", args=("--way", "by-hand"), slow=True),
    Program(name="fed_data", args=("--way", "in-order"), slow=True),
    Program(name="fed_data", args=("--way", "resumed"), slow=True),
    Program(name="fed_data", args=("--way", "shuffled"), slow=True),
    Program(name="fed_data", args=("--way", "whole")),
    Program(name="finetuning", args=("--way", "averaged"), slow=True),
    Program(name="finetuning", args=("--way", "resumed"), slow=True),
    Program(name="finetuning", args=("--way", "thawed"), slow=True),
    Program(name="frozen_companions"),
    Program(name="fsdp1", slow=True),
    Program(name="fsdp1_orig_params", args=("--way", "flat"), slow=True),
    Program(name="fsdp1_orig_params", args=("--way", "full")),
    Program(name="fsdp1_orig_params", args=("--way", "grad-op"), slow=True),
    Program(name="fsdp1_orig_params", args=("--way", "hybrid"), slow=True),
    Program(name="fsdp1_orig_params", args=("--way", "mixed"), slow=True),
    Program(name="fsdp1_orig_params", args=("--way", "whole"), slow=True),
    Program(name="fsdp2"),
    Program(name="fsdp2_compile", args=("--backend", "aot_eager"), slow=True),
    Program(name="fsdp2_compile", args=("--backend", "inductor"), slow=True),
    Program(name="functional_collectives", slow=True),
    Program(name="gan", slow=True),
    Program(name="gathered_evaluation", args=("--way", "by_number"), slow=True),
    Program(name="gathered_evaluation", args=("--way", "cut_at_the_end"), slow=True),
    Program(name="gathered_evaluation", args=("--way", "cut_the_last"), slow=True),
    Program(name="gathered_evaluation", args=("--way", "for_metrics"), slow=True),
    Program(name="gathered_evaluation", args=("--way", "in_training"), slow=True),
    Program(name="gathered_files", slow=True),
    Program(name="gates", args=("--way", "biased"), slow=True),
    Program(name="gates", args=("--way", "late"), slow=True),
    Program(name="gates", args=("--way", "policy"), slow=True),
    Program(name="gates", args=("--way", "seldom", "--steps", "410"), slow=True),
    Program(name="gates", args=("--way", "tasks"), slow=True),
    Program(name="generative", args=("--way", "diffusion-strata"), slow=True),
    Program(name="generative", args=("--way", "gan"), slow=True),
    Program(name="generative", args=("--way", "vae"), slow=True),
    Program(name="hand_made_parallelism", slow=True),
    Program(name="hf_trainer"),
    Program(name="hub_cache", slow=True),
    Program(name="hybrid_meshes", slow=True),
    Program(name="idempotent_writes"),
    *(
        Program(
            name="ignored_experts",
            args=("--wrapper", wrapper, "--names", names),
            slow=(wrapper, names) != ("ddp", "global"),
        )
        for wrapper in ("ddp", "fsdp1", "fsdp2")
        for names in ("global", "local")
    ),
    Program(name="iterable_uneven_fixed", slow=True),
    Program(name="late_gradients", slow=True),
    Program(name="local_sgd", slow=True),
    Program(name="locked_cache"),
    Program(name="look_alikes", args=("--way", "alternate"), slow=True),
    Program(name="look_alikes", args=("--way", "by-size"), slow=True),
    Program(name="look_alikes", args=("--way", "layer-by-layer"), slow=True),
    Program(name="look_alikes", args=("--way", "probed"), slow=True),
    Program(name="look_alikes", args=("--way", "second-by-hand"), slow=True),
    Program(name="look_alikes", args=("--way", "shared-images"), slow=True),
    Program(name="look_alikes", args=("--way", "shared-prompts"), slow=True),
    Program(name="look_alikes", args=("--way", "skipped"), slow=True),
    Program(name="look_alikes", args=("--way", "variants"), slow=True),
    Program(name="loss_scaling", slow=True),
    Program(name="main_process_first"),
    Program(name="marker_file"),
    Program(name="moe_all_to_all", slow=True),
    Program(name="moe_checkpointed", slow=True),
    Program(name="no_destroy", slow=True),
    Program(name="object_collectives"),
    Program(name="objectives", args=("--way", "contrast-own"), slow=True),
    Program(name="objectives", args=("--way", "many-optimizers"), slow=True),
    Program(name="objectives", args=("--way", "queue"), slow=True),
    Program(name="odd_tensors", slow=True),
    Program(name="outer_steps", slow=True),
    Program(name="own_optimizers", args=("--way", "lbfgs"), slow=True),
    Program(name="own_optimizers", args=("--way", "scaled"), slow=True),
    Program(name="own_optimizers", args=("--way", "schedule-free"), slow=True),
    Program(name="own_optimizers", args=("--way", "sharpness-fsdp2"), slow=True),
    Program(name="own_modes", args=("--way", "eager")),
    Program(name="own_modes", args=("--way", "traced")),
    Program(name="own_parts", slow=True),
    Program(name="parameter_server", slow=True),
    Program(name="past_the_wrapper", slow=True),
    Program(name="partial_loads"),
    Program(name="path_handover", slow=True),
    Program(name="periodic_averaging", slow=True),
    Program(name="pipeline"),
    Program(name="pipeline_schedule", slow=True),
    Program(name="placed_sequences", args=("--way", "moved"), slow=True),
    Program(name="placed_sequences", args=("--way", "packed"), slow=True),
    Program(name="population", slow=True),
    Program(name="quantised_base", args=("--way", "subclass"), slow=True),
    Program(name="rank0_extras", slow=True),
    Program(name="reinforcement", args=("--way", "grouped"), slow=True),
    Program(name="reinforcement", args=("--way", "ppo"), slow=True),
    Program(name="replaced_checkpoint"),
    Program(name="resumed_states", slow=True),
    Program(name="ring_attention", slow=True),
    Program(name="schedules", args=("--way", "floor"), slow=True),
    Program(name="schedules", args=("--way", "one-cycle"), slow=True),
    Program(name="schedules", args=("--way", "restarts"), slow=True),
    Program(name="schedules", args=("--way", "staged"), slow=True),
    Program(name="sequence_classifier", slow=True),
    Program(name="sharded_tables", args=("--way", "divided"), slow=True),
    Program(name="sharded_tables", args=("--way", "one-optimizer"), slow=True),
    Program(name="sharded_tables", args=("--way", "summed"), slow=True),
    Program(name="shared_files", slow=True),
    Program(name="split_models", args=("--way", "dropout"), slow=True),
    Program(name="split_models", args=("--way", "sequence"), slow=True),
    Program(name="split_teacher", slow=True),
    Program(name="step_in_backward", slow=True),
    Program(name="store_order", slow=True),
    Program(name="studies", args=("--way", "averaged-late"), slow=True),
    Program(name="studies", args=("--way", "ensemble"), slow=True),
    Program(name="studies", args=("--way", "meta"), slow=True),
    Program(name="studies", args=("--way", "normed"), slow=True),
    Program(name="studies", args=("--way", "search"), slow=True),
    Program(name="studies", args=("--way", "uneven"), slow=True),
    Program(name="studies", args=("--way", "words"), slow=True),
    Program(name="subgroups"),
    Program(name="tensor_parallel"),
    Program(name="token_weights", args=("--way", "global"), slow=True),
    Program(name="token_weights", args=("--way", "global-fsdp2"), slow=True),
    Program(name="token_weights", args=("--way", "masked"), slow=True),
    Program(name="token_weights", args=("--way", "no-division"), slow=True),
    Program(name="token_weights", args=("--way", "samples"), slow=True),
    Program(name="token_weights", args=("--way", "scaled"), slow=True),
    Program(name="token_weights", args=("--way", "sequences"), slow=True),
    Program(name="token_weights", args=("--way", "two-losses"), slow=True),
    Program(name="trainer_kinds", args=("--way", "best"), slow=True),
    Program(name="trainer_kinds", args=("--way", "resume"), slow=True),
    Program(name="unequal_but_legal"),
    Program(name="unreduced_on_purpose", args=("--way", "averages"), slow=True),
    Program(name="unreduced_on_purpose", args=("--way", "flat"), slow=True),
    Program(name="unreduced_on_purpose", args=("--way", "gossip"), slow=True),
    Program(name="unreduced_on_purpose", args=("--way", "signs"), slow=True),
    Program(name="unreduced_on_purpose", args=("--way", "streams"), slow=True),
    Program(name="weighed_sequences", args=("--way", "literal"), slow=True),
    Program(name="weighed_sequences", args=("--way", "setting"), slow=True),
    Program(name="weights_of_choice", args=("--way", "two-losses"), slow=True),
    Program(name="weights_of_choice", args=("--way", "weighed-shards"), slow=True),
    Program(name="weights_of_choice", args=("--way", "weighed-sum"), slow=True),
    Program(name="zero_redundancy", slow=True),
    *(
        Program(name=name, args=tuple(args.split()), slow=slow, nproc=nproc, needs=needs)
        for name, args, slow, nproc, needs in LIBRARY_RUNS
    ),
)


def program_parameters(quick: Collection[str] = ()) -> list[object]:
    """Return the programs as pytest parameters; long ones, and those not in `quick`, are slow."""
    return [
        pytest.param(
            program,
            id=program.label,
            marks=program.marks
            + [pytest.mark.slow] * (program.slow or (bool(quick) and program.name not in quick)),
        )
        for program in PROGRAMS
    ]
