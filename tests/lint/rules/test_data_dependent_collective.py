import pytest

from distdiag.findings.finding import Severity

FOUND = {
    "a value": """
        if loss.item() > 3:
            dist.barrier()  # here
        """,
    "a value by a name": """
        bad = torch.isnan(loss).any()
        if bad:
            dist.all_reduce(x)  # here
        """,
    "the clock": """
        if time.time() - start > 60:
            dist.barrier()  # here
        """,
    "chance": """
        import random
        if random.random() < 0.5:
            accelerator.wait_for_everyone()  # here
        """,
}
SILENT = {
    "a value that all agreed on": """
        dist.all_reduce(loss)
        if loss.item() > 3:
            dist.barrier()
        """,
    "a step": """
        if step % 10 == 0:
            dist.barrier()
        """,
    "a group of some": """
        if loss.item() > 3:
            dist.barrier(group=group)
        """,
    "no collective": """
        if time.time() > 3:
            print("late")
        """,
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_what_a_rank_decides_by_itself_is_found(marked, program):
    assert marked("COL013", program)


@pytest.mark.parametrize("program", SILENT.values(), ids=SILENT)
def test_correct_programs_are_silent(marked, program):
    assert not marked("COL013", program)


@pytest.mark.parametrize(
    ("program", "severity"), [("a value", Severity.INFO), ("the clock", Severity.WARNING)]
)
def test_data_is_a_note_and_a_clock_a_warning(lint, program, severity):
    (found,) = lint("COL013", FOUND[program])
    assert found.severity is severity
