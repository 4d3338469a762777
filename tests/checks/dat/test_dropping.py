from textwrap import dedent

import pytest

from distdiag.checks.dat.duplicated_evaluation_samples import may_drop
from distdiag.events.base import CallSite, Frame
from tests.checks.streams import Program, plain_site

KEEPING = """
    def evaluate(loader):
        answers = []
        for number, batch in enumerate(loader):
            batch = {key: each.to(0) for key, each in batch.items()}
            tokens = batch["ids"][:, :-1]
            answers.append(gather(tokens))  # CALL
        metrics["accuracy"] = mean(answers)
    """

DROPPING = {
    "a cut to the length": "answers = torch.cat(answers)[: len(loader.dataset)]",
    "a cut of both dimensions": "answers = torch.cat(answers)[:num, 0]",
    "a result for each number": "found[number] = answer",
    "pairs of number and answer": "found = dict(zip(numbers, answers))",
    "a table by number": "found = {n: a for n, a in zip(numbers, answers)}",
    "what is not filled up": "answers = answers[~filled]",
    "a named remainder": "drop(answers, loader.remainder)",
    "unique rows": "answers = torch.unique(answers, dim=0)",
}


def test_code_that_keeps_everything(tmp_path):
    assert not may_drop(Program(tmp_path, KEEPING).site("# CALL"))


@pytest.mark.parametrize("line", DROPPING.values(), ids=DROPPING.keys())
def test_code_that_drops_by(line, tmp_path):
    code = dedent(KEEPING).strip("\n") + f"\n    {line}\n"
    assert may_drop(Program(tmp_path, code).site("# CALL"))


@pytest.mark.parametrize(
    "code",
    [
        """
        def score(rows):
            return rows[:20]

        def evaluate(rows):
            return score(gather(rows))  # CALL
        """,
        """
        class Evaluation:
            def add(self, rows):
                self.rows += gather(rows)  # CALL

            def score(self):
                return self.rows[:20]
        """,
        """
        def evaluate(rows):
            return gather(rows)  # CALL

        def main():
            rows = evaluate(loader)  # MAIN
            return rows[:20]
        """,
    ],
    ids=["in a function it calls", "in a method beside it", "in its caller"],
)
def test_rows_may_be_dropped(code, tmp_path):
    program = Program(tmp_path, code)
    lines = [text for text in ("# CALL", "# MAIN") if any(text in row for row in program.lines)]
    assert may_drop(program.site(*lines))


def test_other_functions_tell_nothing(tmp_path):
    code = """
        def read():
            return rows[:20]

        def evaluate(rows):
            return gather(rows)  # CALL
        """
    assert not may_drop(Program(tmp_path, code).site("# CALL"))


def test_code_that_cannot_be_read_may_do_anything():
    assert may_drop(plain_site(3))
    assert may_drop(CallSite((Frame("/site-packages/trainer.py", 3, "evaluate", user=False),)))
