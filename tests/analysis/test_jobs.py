"""Folders of several jobs are split, and nothing else is."""

from pathlib import Path

from distdiag.analysis import split_jobs


def job(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / "rank-0.py-spy.json").touch()
    return folder / name


def test_each_job_of_a_dump_is_analysed_by_itself(tmp_path):
    first, second = (job(tmp_path, name) for name in ("job-node0_29500", "job-node0_29501"))
    assert split_jobs([tmp_path]) == ((first,), (second,))


def test_what_lies_beside_the_jobs_is_no_part_of_them(tmp_path):
    first, second = (job(tmp_path / "dumps", name) for name in ("job-a", "job-b"))
    (tmp_path / "dumps" / "train.log").touch()
    other = tmp_path / "more.log"
    rest = (other, tmp_path / "dumps" / "train.log")
    assert split_jobs([tmp_path / "dumps", other]) == ((first,), (second,), rest)


def test_one_job_is_not_split(tmp_path):
    job(tmp_path, "job-a")
    assert split_jobs([tmp_path, Path("x.log")]) == ((tmp_path, Path("x.log")),)


def test_folders_that_are_only_called_so_are_not_split(tmp_path):
    for name in ("job-1", "job-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").touch()
    assert split_jobs([tmp_path]) == ((tmp_path,),)


def test_no_path_is_one_job_for_a_pipe():
    assert split_jobs([]) == ((),)
