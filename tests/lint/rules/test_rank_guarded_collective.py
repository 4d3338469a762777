import pytest

from distdiag.findings.finding import Severity

GUARDED = {
    "a test on the rank": """
        if dist.get_rank() == 0:
            dist.barrier()  # here
        """,
    "a name that holds the rank": """
        number = int(os.environ["RANK"])
        if number == 0:
            dist.all_reduce(x)  # here
        """,
    "a flag that was made of the rank": """
        def main(args):
            boss = args.local_rank == 0
            if step % 10 == 0 and boss:
                dist.barrier()  # here
        """,
    "an attribute that was made of the rank": """
        class Trainer:
            def __init__(self):
                self.lucky = dist.get_rank() == 0

            def save(self):
                if self.lucky:
                    dist.barrier()  # here
        """,
    "the main process of accelerate": """
        if accelerator.is_main_process:
            accelerator.wait_for_everyone()  # here
        """,
    "a gather of accelerate for a log line": """
        if accelerator.is_local_main_process:
            print(accelerator.gather(loss))  # here
        """,
    "the world's process zero": """
        if self.state.is_world_process_zero:
            dist.broadcast(x, src=0)  # here
        """,
    "Lightning's zero": """
        if trainer.is_global_zero:
            trainer.strategy.barrier()  # here
        """,
    "the environment": """
        if os.environ.get("LOCAL_RANK", "0") == "0":
            dist.barrier()  # here
        """,
    "the else": """
        if rank == 0:
            write()
        else:
            dist.barrier()  # here
        """,
    "a short circuit": """
        rank == 0 and dist.barrier()  # here
        """,
    "a conditional expression": """
        x = dist.all_reduce(y) if rank == 0 else None  # here
        """,
    "a rank that is not known here": """
        if rank == owner:
            dist.broadcast(x, src=owner)  # here
        """,
    "a decorator of Lightning": """
        from lightning.pytorch.utilities import rank_zero_only

        @rank_zero_only
        def save():
            dist.barrier()  # here
        """,
    "a decorator of accelerate": """
        @accelerator.on_main_process
        def save():
            accelerator.wait_for_everyone()  # here
        """,
    "an earlier return": """
        def main(rank):
            if rank != 0:
                return
            dist.barrier()  # here
        """,
    "an earlier return under another condition": """
        def main(rank):
            if epoch % 5 == 0:
                if rank != 0:
                    return
                write()
            dist.barrier()  # here
        """,
    "an early stop that one rank decides": """
        for epoch in range(9):
            if rank == 0 and is_good(loss):
                break
            dist.all_reduce(x)  # here
        """,
    "a break further on in the loop": """
        for epoch in range(9):
            dist.all_reduce(x)  # here
            if rank == 0:
                if is_good(loss):
                    break
        """,
    "a continue": """
        for batch in batches:
            if rank == 1:
                continue
            dist.all_reduce(x)  # here
        """,
    "the end of the process": """
        import sys
        if rank > 0:
            sys.exit(0)
        dist.barrier()  # here
        """,
    "a rank in the group of the call": """
        if dist.get_rank(group) == 0:
            dist.all_reduce(x, group=group)  # here
        """,
    "branches with unlike collectives": """
        if rank == 0:
            dist.broadcast(x, src=0)  # here
        else:
            dist.all_reduce(x)  # here
        """,
    "a barrier on the local zeros and one on the others": """
        if local_rank != 0:
            dist.barrier()  # here
        download()
        if rank == 0:
            dist.barrier()  # here
        """,
    "a whole tensor of a sharded one": """
        if dist.get_rank() == 0:
            torch.save(weight.full_tensor(), "w.pt")  # here
        """,
}

SILENT = {
    "no condition": """
        dist.barrier()
        """,
    "another condition": """
        if epoch % 5 == 0:
            dist.barrier()
        """,
    "a message only": """
        if rank == 0:
            print("hello")
        dist.barrier()
        """,
    "both branches": """
        if rank == 0:
            dist.broadcast_object_list(data, src=0)
        else:
            data = [None]
            dist.broadcast_object_list(data, src=0)
        """,
    "the main process first": """
        if rank != 0:
            dist.barrier()
        download()
        if rank == 0:
            dist.barrier()
        """,
    "the main process first, as it was before torchrun": """
        if args.local_rank not in [-1, 0]:
            torch.distributed.barrier()
        load()
        if args.local_rank == 0:
            torch.distributed.barrier()
        """,
    "a context manager for the main process first": """
        def first(is_main):
            if not is_main_process:
                dist.barrier()
            yield
            if is_main_process:
                dist.barrier()
        """,
    "both ways of an early return": """
        def main(rank):
            if rank != 0:
                dist.barrier()
                return
            download()
            dist.barrier()
        """,
    "the question whether the run is distributed": """
        if args.local_rank != -1:
            dist.barrier()
        if dist.is_initialized() and dist.get_rank() >= 0:
            dist.barrier()
        if world_size > 1:
            dist.barrier()
        """,
    "members of a group": """
        if rank in ranks:
            dist.all_reduce(x, group=group)
        if rank == 0:
            dist.barrier(group=own)
        """,
    "point to point": """
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
        """,
    "one rank after the other": """
        for turn in range(world_size):
            if turn == rank:
                work()
            dist.barrier()
        """,
    "a rank that is the item of a loop": """
        for rank in range(world_size):
            if rank == 0:
                dist.barrier()
        """,
    "a parameter that says how to load": """
        def load(rank0):
            if rank0:
                dist.barrier()
        """,
    "the rank of an adapter": """
        if config.lora_rank == 0:
            dist.barrier()
        if placement.rank == 0:
            dist.barrier()
        """,
    "a function that is only defined there": """
        if rank == 0:
            def finish():
                dist.barrier()
        """,
    "a return that all take": """
        def main(rank):
            if not distributed_run:
                if rank != 0:
                    return
                return
            dist.barrier()
        """,
    "what one rank or all do": """
        if rank == 0 or is_sharded:
            dist.barrier()
        """,
    "a function for the others, defined in the other branch": """
        def main(rank):
            if rank == 0:
                def objective(trial):
                    dist.broadcast_object_list([trial], src=0)
                study.optimize(objective)
            else:
                dist.broadcast_object_list(trials, src=0)
        """,
    "ranks that leave before there is a process group": """
        def main(rank, world_size):
            if rank == world_size - 1:
                evaluate()
                return
            dist.init_process_group("gloo", world_size=world_size - 1)
            dist.barrier()
        """,
    "a barrier of threads": """
        import threading
        meeting = threading.Barrier(2)
        if rank == 0:
            meeting.wait()
        """,
}


@pytest.mark.parametrize("program", GUARDED.values(), ids=GUARDED)
def test_a_collective_that_some_ranks_do_not_call_is_found(marked, program):
    assert marked("COL009", program)


@pytest.mark.parametrize("program", SILENT.values(), ids=SILENT)
def test_correct_programs_are_silent(marked, program):
    assert not marked("COL009", program)


CALLS = {
    "a function": """
        def finish():
            dist.barrier()

        if rank == 0:
            finish()  # here
        """,
    "a method of the class": """
        class Trainer:
            def save(self):
                if self.rank == 0:
                    self.finish()  # here

            def finish(self):
                if dist.is_initialized():
                    dist.barrier()
        """,
    "a method of a class above": """
        class Base:
            def finish(self):
                dist.barrier()

        class Trainer(Base):
            def save(self):
                if self.rank == 0:
                    self.finish()  # here
        """,
    "an object of a known class": """
        class Meter:
            def total(self):
                for x in self.values:
                    dist.all_reduce(x)

        meter = Meter()
        if rank == 0:
            print(meter.total())  # here
        """,
    "another file": """
        from helpers import finish

        if rank == 0:
            finish()  # here
        """,
    "another file by its module": """
        import helpers

        if rank == 0:
            helpers.outer()  # here
        """,
}
SILENT_CALLS = {
    "a function that calls it only if asked to": """
        def finish(wait=False):
            if wait:
                dist.barrier()

        if rank == 0:
            finish()
        """,
    "a function that guards itself": """
        def finish():
            if rank != 0:
                return
            write()

        if rank == 0:
            finish()
        """,
    "a group that is passed": """
        def finish(group=None):
            dist.barrier(group=group)

        if rank in ranks:
            finish(group)
        """,
    "both branches": """
        def lead():
            dist.broadcast(x, src=0)

        def follow():
            dist.broadcast(x, src=0)

        if rank == 0:
            lead()
        else:
            follow()
        """,
    "a function that calls itself": """
        def again(n):
            return again(n - 1)

        if rank == 0:
            again(3)
        """,
}
HELPERS = """
    import torch.distributed as dist

    def finish():
        dist.barrier()

    def outer():
        finish()
    """


@pytest.mark.parametrize("program", CALLS.values(), ids=CALLS)
def test_calls_are_followed_through_the_files(marked, program):
    assert marked("COL009", program, helpers=HELPERS)


@pytest.mark.parametrize("program", SILENT_CALLS.values(), ids=SILENT_CALLS)
def test_calls_that_lead_to_nothing_are_silent(marked, program):
    assert not marked("COL009", program, helpers=HELPERS)


def test_the_default_of_a_group_is_all_ranks(lint):
    (found,) = lint(
        "COL009",
        """
        def finish(group=None):
            dist.barrier(group=group)

        if rank == 0:
            finish()
        """,
    )
    assert found.severity is Severity.WARNING
    assert "which calls dist.barrier (train.py:9)," in found.message


def test_a_finding_tells_the_condition_and_the_way_to_the_collective(lint):
    (found,) = lint("COL009", CALLS["another file by its module"], helpers=HELPERS)
    assert "it stands under `rank == 0` (line 10)" in found.message
    assert [(place.line, place.message) for place in found.related] == [
        (10, "the condition"),
        (8, "calls finish"),
        (5, "calls dist.barrier"),
    ]


def test_a_direct_call_is_an_error_with_its_place(lint):
    (found,) = lint("COL009", GUARDED["a test on the rank"])
    assert found.severity is Severity.ERROR
    assert (found.line, found.column, found.source) == (9, 5, "dist.barrier()  # here")


def test_a_rank_that_raises_is_a_note_since_it_ends_the_job(lint):
    (found,) = lint(
        "COL009",
        """
        if rank == 0 and os.path.exists(folder):
            raise ValueError(folder)
        dist.barrier()
        """,
    )
    assert found.severity is Severity.INFO
    assert "comes after a raise" in found.message


def test_conditions_that_may_exclude_each_other_are_a_note(lint):
    (found,) = lint(
        "COL009",
        """
        def main(rank):
            if mode == "export":
                if rank != 0:
                    return
                export()
            if backend == "mpi":
                dist.barrier()
        """,
    )
    assert found.severity is Severity.INFO
