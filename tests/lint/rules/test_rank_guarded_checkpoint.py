import pytest

from distdiag.findings.finding import Severity

FOUND = {
    "accelerate": """
        if accelerator.is_main_process:
            accelerator.save_state(folder)  # here
        """,
    "the weights of a sharded model": """
        if accelerator.is_main_process:
            weights = accelerator.get_state_dict(model)  # here
        """,
    "an engine of DeepSpeed": """
        import deepspeed
        engine, _, _, _ = deepspeed.initialize(model=model)
        model_engine = engine
        if rank == 0:
            model_engine.save_checkpoint(folder)  # here
        """,
    "distributed checkpoint": """
        import torch.distributed.checkpoint as dcp
        if dist.get_rank() == 0:
            dcp.save(state, checkpoint_id=folder)  # here
        """,
    "state dicts of distributed checkpoint": """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        def save(rank):
            if rank != 0:
                return
            torch.save(get_model_state_dict(model), "m.pt")  # here
        """,
    "Fabric": """
        if fabric.global_rank == 0:
            fabric.save("c.ckpt", state)  # here
        """,
    "through a method": """
        class Trainer:
            def save(self):
                self.accelerator.save_state("c")

            def main(self):
                if self.accelerator.is_main_process:
                    self.save()  # here
        """,
}
SILENT = {
    "on all ranks": """
        accelerator.save_state(folder)
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            torch.save(weights, "w.pt")
        """,
    "without ranks": """
        import torch.distributed.checkpoint as dcp
        if dist.get_rank() == 0:
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        """,
    "a plain file of one rank": """
        if rank == 0:
            torch.save(model.module.state_dict(), "m.pt")
        """,
    "something else that has this name": """
        if rank == 0:
            writer.save_state(folder)
            editor.save_checkpoint(folder)
        """,
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_saving_sharded_state_on_some_ranks_is_found(marked, program):
    assert marked("CKP001", program)


@pytest.mark.parametrize("program", SILENT.values(), ids=SILENT)
def test_correct_programs_are_silent(marked, program):
    assert not marked("CKP001", program)


def test_what_replicated_models_get_away_with_is_a_warning(lint):
    (found,) = lint("CKP001", FOUND["accelerate"])
    assert found.severity is Severity.WARNING
    (found,) = lint("CKP001", FOUND["distributed checkpoint"])
    assert found.severity is Severity.ERROR
