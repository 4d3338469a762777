import pytest

FOUND = {
    "written and read": """
        if rank == 0:
            torch.save(state, "s.pt")
        state = torch.load("s.pt")  # here
        """,
    "one path by two names": """
        path = os.path.join(folder, "vocab.json")
        if accelerator.is_main_process:
            with open(path, "w") as file:
                file.write("{}")
        vocab = open(f"{folder}/vocab.json").read()  # here
        """,
    "read by the others only": """
        from pathlib import Path
        if local_rank == 0:
            Path("x.txt").write_text("x")
        else:
            text = Path("x.txt").read_text()  # here
        """,
    "a barrier before the write": """
        dist.barrier()
        if rank == 0:
            torch.save(state, path)
        state = torch.load(path)  # here
        """,
    "a model": """
        if trainer.is_world_process_zero():
            model.save_pretrained(folder)
        other = Model.from_pretrained(folder)  # here
        """,
    "a return of those that do not write": """
        def main(rank, path):
            if rank == 0:
                torch.save(state, path)
                return None
            return torch.load(path)  # here
        """,
}
SILENT = {
    "a barrier between": """
        if rank == 0:
            torch.save(state, path)
        dist.barrier()
        state = torch.load(path)
        """,
    "a barrier in a function": """
        def meet():
            dist.barrier()
        if rank == 0:
            torch.save(state, path)
        meet()
        state = torch.load(path)
        """,
    "a call whose name says that ranks meet": """
        if rank == 0:
            torch.save(state, path)
        library.synchronize()
        state = torch.load(path)
        """,
    "polling": """
        if rank == 0:
            torch.save(state, path)
        while not os.path.exists(path):
            time.sleep(1)
        state = torch.load(path)
        """,
    "read by the writer only": """
        if rank == 0:
            torch.save(state, path)
            state = torch.load(path)
        """,
    "read under the same condition later": """
        if rank == 0:
            torch.save(state, path)
        work()
        if dist.get_rank() == 0:
            state = torch.load(path)
        """,
    "another file": """
        if rank == 0:
            torch.save(state, "a.pt")
        state = torch.load("b.pt")
        """,
    "a file of each rank": """
        if rank < 2:
            torch.save(state, f"{rank}.pt")
        state = torch.load(f"{rank}.pt")
        """,
    "a reader that tolerates absence": """
        if rank == 0:
            torch.save(state, path)
        try:
            state = torch.load(path)
        except FileNotFoundError:
            state = None
        """,
    "branches of another condition": """
        if is_saving:
            if rank == 0:
                torch.save(state, path)
        else:
            state = torch.load(path)
        """,
    "a return behind the write": """
        def main(rank, path):
            if is_saving:
                if rank == 0:
                    torch.save(state, path)
                return None
            return torch.load(path)
        """,
    "read before it is written": """
        state = torch.load(path)
        if rank == 0:
            torch.save(state, path)
        """,
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_a_read_that_nothing_orders_is_found(marked, program):
    assert marked("BAR001", program)


@pytest.mark.parametrize("program", SILENT.values(), ids=SILENT)
def test_correct_programs_are_silent(marked, program):
    assert not marked("BAR001", program)


def test_the_write_and_its_condition_are_reported(lint):
    (found,) = lint("BAR001", FOUND["written and read"])
    assert "torch.save in line 9 under `rank == 0`" in found.message
    assert [place.line for place in found.related] == [9]
