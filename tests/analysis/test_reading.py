"""Files are read in processes of their own, and one that kills its process costs one line."""

import io
import os
import pickle
import signal
import tarfile

from distdiag.analysis import reading
from distdiag.analysis.reading import read_files
from tests.dumps.recorders import recorders, write_dumps


def read(*paths, skip_folder=lambda folder: False, progress=lambda num_files: None, stream=None):
    return read_files(paths, skip_folder=skip_folder, progress=progress, stream=stream)


def jobs_dumps(folder, world=6):
    ranks = recorders(world)
    for recorder in ranks:
        recorder.call()
    return write_dumps(folder, ranks)


def names(contents):
    return [dump.path.rsplit("/", 1)[-1] for dump in contents.dumps]


def test_what_the_files_hold_comes_in_the_order_of_their_names(tmp_path):
    seen = []
    contents = read(jobs_dumps(tmp_path), progress=seen.append)
    assert names(contents) == [f"nccl_trace_rank_{rank}" for rank in range(6)]
    assert seen == [1, 2, 3, 4, 5, 6]


def test_no_more_processes_are_forked_than_there_are_files(tmp_path, monkeypatch):
    begin, sizes = reading._processes, []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(reading, "_processes", lambda num: sizes.append(num) or begin(num))
    contents = read(*jobs_dumps(tmp_path / "two", world=2).iterdir())
    assert (len(contents.dumps), sizes) == (2, [2])
    assert len(read(jobs_dumps(tmp_path / "nine", world=9)).dumps) == 9
    assert sizes == [2, 8]


def test_a_file_that_kills_its_process_costs_one_line(tmp_path, monkeypatch):
    class Deadly:
        name = "deadly"

        def recognises(self, dump):
            return dump.data == b"poison"

        def read(self, dump):
            os.kill(os.getpid(), signal.SIGKILL)

    known = reading.load_readers()
    monkeypatch.setattr(reading, "load_readers", lambda: (Deadly(), *known))
    reading._readers.cache_clear()
    jobs_dumps(tmp_path)
    (tmp_path / "nccl_trace_rank_3x").write_bytes(b"poison")
    try:
        contents = read(tmp_path)
    finally:
        reading._readers.cache_clear()
    (problem,) = contents.problems
    assert "nccl_trace_rank_3x: cannot be read: it took too much memory or time" in problem
    assert len(contents.dumps) == 6


def test_a_reader_with_a_fault_costs_one_line(tmp_path, monkeypatch):
    class Faulty:
        name = "faulty"

        def recognises(self, dump):
            return True

        def read(self, dump):
            raise ZeroDivisionError("oh")

    monkeypatch.setattr(reading, "load_readers", lambda: (Faulty(),))
    reading._readers.cache_clear()
    (tmp_path / "a.txt").write_text("x")
    try:
        contents = read(tmp_path)
    finally:
        reading._readers.cache_clear()
    assert contents.problems == [f"{tmp_path}/a.txt: cannot be read: ZeroDivisionError: oh"]


def test_each_bad_file_is_one_line_and_the_rest_is_read(tmp_path):
    jobs_dumps(tmp_path, world=2)
    good = (tmp_path / "nccl_trace_rank_0").read_bytes()
    (tmp_path / "cut").write_bytes(good[:-100])
    (tmp_path / "deep.json").write_bytes(b'{"pg_config": ' + b"[" * 200)
    (tmp_path / "evil").write_bytes(b"\x80\x02cos\nsystem\nX\x09\x00\x00\x00pg_config\x85R.")
    (tmp_path / "other.bin").write_bytes(b"\x00\x01\x02")
    (tmp_path / "way-out").symlink_to("/etc/passwd")
    (tmp_path / "a\x1b[31mred").write_bytes(b"hello")
    contents = read(tmp_path)
    assert names(contents) == ["nccl_trace_rank_0", "nccl_trace_rank_1"]
    by_name = {problem.split(":")[0].rsplit("/", 1)[-1]: problem for problem in contents.problems}
    assert set(by_name) == {"cut", "deep.json", "evil", "way-out"}
    assert "no whole pickle" in by_name["cut"]
    assert "asks for os.system" in by_name["evil"]
    assert "leaves the folder" in by_name["way-out"]
    assert [path.rsplit("/", 1)[-1] for path in contents.foreign] == ["a\\x1b[31mred"]
    assert contents.passed_over == {"checkpoints": 1}
    assert not any("\n" in problem or "\x1b" in problem for problem in contents.problems)


def test_members_of_archives_are_read_and_bombs_are_not(tmp_path):
    jobs_dumps(tmp_path / "dumps", world=2)
    (tmp_path / "zeros").write_bytes(bytes(100 << 20))
    with tarfile.open(tmp_path / "dumps.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "dumps", "dumps")
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "zeros", "zeros")
    contents = read(tmp_path / "dumps.tar.gz", tmp_path / "bomb.tar.gz")
    assert names(contents) == ["dumps.tar.gz!dumps" + f"/nccl_trace_rank_{r}" for r in (0, 1)] or (
        [dump.path.rsplit("!", 1)[-1] for dump in contents.dumps]
        == ["dumps/nccl_trace_rank_0", "dumps/nccl_trace_rank_1"]
    )
    assert any("bomb" in problem for problem in contents.problems)


def test_a_folder_that_is_to_be_skipped_is_left_out(tmp_path):
    jobs_dumps(tmp_path / "run")
    jobs_dumps(tmp_path / "other", world=1)
    contents = read(tmp_path, skip_folder=lambda folder: folder.name == "run")
    assert names(contents) == ["nccl_trace_rank_0"]


def test_a_pickle_that_is_no_dump_is_foreign(tmp_path):
    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"a": 1}))
    assert read(tmp_path).foreign == [f"{tmp_path}/weights.pt"]


def test_of_each_file_it_is_reported_how_much_was_understood(tmp_path):
    jobs_dumps(tmp_path, world=1)
    trace = ["Traceback (most recent call last):", '  File "/data/a.py", line 9, in f', "E: no"]
    lines = ["step 1", *(f"[rank3]: {line}" for line in trace), "step 2"]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "notes.txt").write_text("hello\nworld")
    (tmp_path / "empty.log").write_text("")
    files = {file.path.rsplit("/", 1)[-1]: file for file in read(tmp_path).files}
    assert (files["train.log"].kinds, files["train.log"].num_lines) == (("log",), 5)
    assert (files["train.log"].num_understood, files["train.log"].problem) == (3, "")
    recorder = files["nccl_trace_rank_0"]
    assert (recorder.kinds, recorder.num_understood) == (("flight recorder",), 1)
    notes = files["notes.txt"]
    assert (notes.kinds, notes.num_lines) == ((), 2)
    assert notes.problem == "nothing in it is of a kind that is known"
    assert files["empty.log"].problem == "it is empty"


def test_a_damaged_file_says_what_of_it_was_not_understood(tmp_path):
    good = (jobs_dumps(tmp_path, world=1) / "nccl_trace_rank_0").read_bytes()
    (tmp_path / "nccl_trace_rank_0").write_bytes(good[:-100])
    (file,) = read(tmp_path).files
    assert file.kinds == ()
    assert "no whole pickle" in file.problem


def test_a_pipe_may_hold_a_log_or_an_archive(tmp_path):
    jobs_dumps(tmp_path / "dumps", world=2)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        archive.add(tmp_path / "dumps", "dumps")
    file.seek(0)
    assert names(read(stream=file)) == [f"nccl_trace_rank_{rank}" for rank in (0, 1)]
    contents = read(stream=io.BytesIO(b"[rank0]: terminate called without an active exception\n"))
    assert [found.path for found in contents.files] == ["stdin"]
