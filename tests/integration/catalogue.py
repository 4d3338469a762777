"""The correct programs: on each of them distdiag must be silent and change nothing."""

import importlib.util
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


_PLAIN = (
    *("accelerate_files", "accelerate_loop", "actor_learner", "adapters", "append_logs"),
    *("async_checkpoint", "async_overlap", "background_thread", "caught_exceptions"),
    *("checkpoint_rotation", "comm_hook", "converged", "ddp", "ddp_join", "ddp_variants"),
    "device_mesh_2d",
    *("early_stop_agreed", "frozen_companions", "fsdp1", "fsdp2", "functional_collectives", "gan"),
    *("gathered_files", "hand_made_parallelism", "hf_trainer", "hub_cache", "hybrid_meshes"),
    *("idempotent_writes", "iterable_uneven_fixed", "late_gradients", "local_sgd", "locked_cache"),
    *("loss_scaling", "main_process_first", "marker_file", "moe_all_to_all", "moe_checkpointed"),
    *("no_destroy", "object_collectives", "odd_tensors", "outer_steps", "own_parts"),
    *("parameter_server", "partial_loads", "past_the_wrapper", "path_handover"),
    *("periodic_averaging", "pipeline", "pipeline_schedule", "population", "rank0_extras"),
    *("replaced_checkpoint", "resumed_states", "ring_attention", "sequence_classifier"),
    *("shared_files", "split_teacher", "step_in_backward", "store_order", "subgroups"),
    *("tensor_parallel", "unequal_but_legal", "zero_redundancy"),
)
_WAYS = {
    "batch_norms": ("alike", "eight", "evaluated", "frozen", "points", "vectors"),
    "batches": ("buckets", "stream-workers"),
    "clipping": (
        *("hand-fsdp2", "items-fsdp2", "late-probe", "late-scalar", "norm-fsdp2", "sparse-probe"),
        "value-probe",
    ),
    "crossing_attention": (
        *("across-samples", "across-texts", "looped", "pooled", "pooled-sum", "streams"),
        "streams-seeded",
    ),
    "evaluations": ("files", "gathered", "periodic", "reduced", "whole"),
    "fed_data": ("by-hand", "in-order", "resumed", "shuffled", "whole"),
    "finetuning": ("averaged", "resumed", "thawed"),
    "fsdp1_orig_params": ("flat", "full", "grad-op", "hybrid", "mixed", "whole"),
    "gates": ("biased", "late", "policy", "tasks"),
    "gathered_evaluation": (
        *("by_number", "cut_at_the_end", "cut_the_last", "for_metrics", "in_training"),
    ),
    "generative": ("diffusion-strata", "gan", "vae"),
    "look_alikes": (
        *("alternate", "by-size", "layer-by-layer", "probed", "second-by-hand", "shared-images"),
        *("shared-prompts", "skipped", "variants"),
    ),
    "objectives": ("contrast-own", "many-optimizers", "queue"),
    "own_modes": ("eager", "traced"),
    "own_optimizers": ("lbfgs", "scaled", "schedule-free", "sharpness-fsdp2"),
    "placed_sequences": ("moved", "packed"),
    "quantised_base": ("subclass",),
    "reinforcement": ("grouped", "ppo"),
    "schedules": ("floor", "one-cycle", "plateau", "restarts", "staged"),
    "sharded_tables": ("divided", "one-optimizer", "summed"),
    "split_models": ("dropout", "sequence"),
    "studies": ("averaged-late", "ensemble", "meta", "normed", "search", "uneven", "words"),
    "token_weights": (
        *("global", "global-fsdp2", "masked", "no-division", "samples", "scaled", "sequences"),
        "two-losses",
    ),
    "trainer_kinds": ("best", "resume"),
    "unreduced_on_purpose": ("averages", "flat", "gossip", "signs", "streams"),
    "weighed_sequences": ("literal", "setting"),
    "weights_of_choice": ("two-losses", "weighed-shards", "weighed-sum"),
}
"""The programs that take `--way`, and the ways there are."""
_BACKENDS = ("aot_eager", "inductor")
_WRAPPERS = ("ddp", "fsdp1", "fsdp2")

PROGRAMS = (
    *(Program(name=name) for name in _PLAIN),
    *(Program(name=name, args=("--way", way)) for name, ways in _WAYS.items() for way in ways),
    *(
        Program(name=name, args=("--backend", backend))
        for name in ("ddp_compile", "fsdp2_compile")
        for backend in _BACKENDS
    ),
    *(
        Program(name="ignored_experts", args=("--wrapper", wrapper, "--names", names))
        for wrapper in _WRAPPERS
        for names in ("global", "local")
    ),
    Program(name="dataloader_workers", args=("--start-methods", "fork", "spawn")),
    Program(name="gates", args=("--way", "seldom", "--steps", "410")),
    *(
        Program(name=name, args=tuple(args.split()), nproc=nproc, needs=needs)
        for name, args, nproc, needs in LIBRARY_RUNS
    ),
)


def program_parameters() -> list[object]:
    """Return each program with its launcher as pytest parameters.

    The quick form forks the ranks of one way of each program. The long one forks those of all ways,
    and runs all under torchrun, too.
    """
    found: list[object] = []
    names: set[str] = set()
    for program in PROGRAMS:
        for launcher, is_slow in (("forked", program.name in names), ("torchrun", True)):
            marks = program.marks + [pytest.mark.slow] * is_slow
            label = f"{program.label}-{launcher}"
            found.append(pytest.param(program, launcher, id=label, marks=marks))
        names.add(program.name)
    return found
