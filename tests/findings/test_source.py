from textwrap import dedent

import pytest

from distdiag.events.base import Frame
from distdiag.findings.source import (
    are_exclusive,
    guards,
    is_readable,
    location_of,
    loop_lines,
    rank_guards,
    record_guards,
)

CALL = "CALL"


def frame_of(tmp_path, code, function="main"):
    text = dedent(code).strip("\n") + "\n"
    path = tmp_path / "train.py"
    path.write_text(text)
    line = next(i for i, row in enumerate(text.splitlines(), 1) if CALL in row)
    return Frame(str(path), line, function)


GUARDED = {
    "an if": """
        if rank == 0:
            CALL()
        """,
    "one line": """
        if rank == 0: CALL()
        """,
    "the else of a test on the rank": """
        if dist.get_rank() == 0:
            pass
        else:
            CALL()
        """,
    "an elif": """
        if step > 3:
            pass
        elif accelerator.is_main_process:
            CALL()
        """,
    "a nested condition that is no test of the rank": """
        if is_local_main_process:
            if step % 10 == 0:
                for x in data:
                    CALL(x)
        """,
    "a part of a condition": """
        if step % 10 == 0 and trainer.is_world_process_zero():
            CALL()
        """,
    "a flag that was made of the rank": """
        def main(rank):
            is_first = rank == 0
            lucky = is_first and True
            if lucky:
                CALL()
        """,
    "an attribute made of the rank elsewhere": """
        class Trainer:
            def __init__(self):
                self.boss = dist.get_rank() == 0
            def main(self):
                if self.boss:
                    CALL()
        """,
    "the environment": """
        number = int(os.environ["LOCAL_RANK"])
        def main():
            if number == 0:
                CALL()
        """,
    "an earlier return": """
        def main(rank):
            if rank != 0:
                return
            CALL()
        """,
    "an earlier continue in a loop": """
        for step in range(3):
            if self.global_rank > 0:
                log()
                continue
            with scope():
                CALL()
        """,
    "a conditional expression": """
        x = CALL() if rank == 0 else None
        """,
    "a short circuit": """
        is_master and CALL()
        """,
    "a call in the rest of the test itself": """
        if rank == 0 and CALL():
            pass
        """,
    "a decorator": """
        @rank_zero_only
        def main():
            CALL()
        """,
    "a while": """
        while rank < 2:
            CALL()
        """,
    "a match": """
        match rank:
            case 0:
                CALL()
        """,
    "a stage of a pipeline": """
        if schedule.is_first_stage:
            CALL()
        """,
    "a mesh coordinate": """
        coords = mesh.get_coordinate()
        if coords[0] == 0:
            CALL()
        """,
}

FREE = {
    "no condition": """
        CALL()
        """,
    "another condition": """
        if step % 10 == 0:
            CALL()
        """,
    "the test itself": """
        if CALL() == rank:
            pass
        """,
    "behind an if that did not leave": """
        if rank == 0:
            print("hello")
        CALL()
        """,
    "a return of another function": """
        def other(rank):
            if rank == 0:
                return
        def main():
            CALL()
        """,
    "the rank of an adapter": """
        if lora_rank > 0:
            CALL()
        """,
    "data that was read for the rank": """
        batch = load(rank)
        if batch.ok:
            CALL()
        """,
    "an argument chosen by rank beside the call": """
        CALL(0 if rank == 0 else 1)
        """,
    "the world size": """
        if dist.get_world_size() > 1:
            CALL()
        """,
}


@pytest.mark.parametrize("code", GUARDED.values(), ids=GUARDED)
def test_a_call_is_guarded_by_rank_through(code, tmp_path):
    assert rank_guards(frame_of(tmp_path, code))


@pytest.mark.parametrize("code", FREE.values(), ids=FREE)
def test_a_call_is_not_guarded_by_rank_through(code, tmp_path):
    assert rank_guards(frame_of(tmp_path, code)) == ()


def test_a_guard_says_where_it_is_and_how_it_reads(tmp_path):
    (guard,) = rank_guards(frame_of(tmp_path, "x = 1\nif rank == 0:\n    CALL()"))
    assert (guard.location.line, guard.text) == (2, "if rank == 0:")


def test_guards_keep_other_conditions_apart_from_those_on_the_rank(tmp_path):
    code = "def main():\n    if not active:\n        return\n    if rank == 0:\n        CALL()"
    assert [g.by_rank for g in guards(frame_of(tmp_path, code))] == [False, True]


def test_loops_are_those_of_the_frame_s_own_function(tmp_path):
    code = """
        for epoch in range(3):
            def main():
                while True:
                    CALL()
        """
    frame = frame_of(tmp_path, code)
    assert loop_lines(frame) == {(frame.file, 3)}


def test_the_iterable_of_a_loop_is_not_inside_it(tmp_path):
    frame = frame_of(tmp_path, "for x in CALL():\n    pass")
    assert loop_lines(frame) == frozenset()
    assert loop_lines(frame, with_head=True) == {(frame.file, 1)}


def test_a_location_holds_the_stripped_text(tmp_path):
    assert location_of(frame_of(tmp_path, "if x:\n    CALL()")).source == "CALL()"


@pytest.mark.parametrize("text", ["def (", "\0", "x = '\\d'\n" * 3, ""])
def test_a_file_that_is_not_python_gives_no_guards(text, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert rank_guards(Frame(str(path), 1, "main")) == ()


@pytest.mark.parametrize("name", ["missing.py", "secret.txt", "<string>", "/dev/zero", "a\0b.py"])
def test_what_cannot_or_must_not_be_read_gives_an_empty_text(name, tmp_path):
    (tmp_path / "secret.txt").write_text("password")
    path = name if name.startswith(("<", "/")) else str(tmp_path / name)
    frame = Frame(path, 1, "main")
    assert location_of(frame).source == ""
    assert not is_readable(frame)
    assert guards(frame) == ()
    assert loop_lines(frame) == frozenset()


def test_a_file_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "huge.py"
    path.write_text("x = 1\n" * 400_000)
    assert not is_readable(Frame(str(path), 1, "main"))


@pytest.mark.parametrize(
    ("first", "second", "exclusive"), [(2, 4, True), (4, 2, True), (2, 5, False), (4, 5, False)]
)
def test_lines_in_the_two_branches_of_a_condition_exclude_each_other(
    first, second, exclusive, tmp_path
):
    path = tmp_path / "train.py"
    path.write_text("if rank == 0:\n    a()\nelse:\n    b()\nc()\n")
    frames = [Frame(str(path), line, "<module>") for line in (first, second)]
    assert are_exclusive(*frames) is exclusive


RECORDS = {
    "an if": """
        if loss < best:
            best = loss
            CALL()
        """,
    "behind a test on the rank": """
        if rank == 0 and metrics["f1"] >= self.best:
            self.best = metrics["f1"]
            CALL()
        """,
    "the greater of both": """
        if score > best:
            CALL()
        best = max(best, score)
        """,
    "a name for it": """
        is_best = best is None or score > best
        if is_best:
            best = score
        if rank == 0 and is_best:
            CALL()
        """,
}
NO_RECORDS = {
    "a period": """
        if step % 100 == 0:
            CALL()
        """,
    "a time": """
        if time.time() - last > 600:
            last = time.time()
            CALL()
        """,
    "the next step of several": """
        if step >= next_save:
            next_save = step + 100
            CALL()
        """,
    "an epoch": """
        for epoch in range(9):
            if epoch > last:
                last = epoch
                CALL()
        """,
    "a threshold": """
        if loss < 0.1:
            CALL()
        """,
    "beside it": """
        if loss < best:
            best = loss
        CALL()
        """,
}


@pytest.mark.parametrize("code", RECORDS.values(), ids=RECORDS)
def test_a_call_is_made_for_the_best_value_so_far(code, tmp_path):
    (found,) = record_guards([frame_of(tmp_path, code)])
    assert found.location.line
    assert not found.by_rank


@pytest.mark.parametrize("code", NO_RECORDS.values(), ids=NO_RECORDS)
def test_a_call_is_not_made_for_the_best_value_so_far(code, tmp_path):
    assert not list(record_guards([frame_of(tmp_path, code)]))


def test_the_answer_may_be_handed_down_by_its_name(tmp_path):
    code = """
        def save(state, is_best):
            write(state)
            if is_best:
                INNER()
        def main():
            is_best = score > best
            best = max(score, best)
            save(state, is_best)
        """
    path = tmp_path / "handed.py"
    path.write_text(dedent(code).strip("\n") + "\n")
    frames = [Frame(str(path), 4, "save"), Frame(str(path), 8, "main")]
    (found,) = record_guards(frames)
    assert found.text == "is_best = score > best"
