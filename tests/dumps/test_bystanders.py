"""What lies beside logs and dumps is told by its name and its first bytes."""

import gzip
import io
import pickle
import tarfile
import zipfile
from collections import Counter

import pytest

from distdiag.dumps.bystanders import LARGE, LARGE_ARCHIVE, kind_by_head, kind_by_name
from distdiag.dumps.files import walk
from distdiag.dumps.reading import Dump

LOG = b"step 1\n[rank0]: Traceback (most recent call last):\n"


def tar_with(name):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


def zip_with(name):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"x")  # without the time of day
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train.py", "sources"),
        ("config.yaml", "sources"),
        ("model-00001-of-00007.safetensors", "checkpoints"),
        ("__3_0.distcp", "checkpoints"),
        ("0001.JPG", "data"),
        ("part-7.parquet", "data"),
        ("events.out.tfevents.1700000000.node0.1.0", "data"),
        ("train.log", ""),
        ("slurm-47.out", ""),
        ("job.e4711", ""),
        ("stdout", ""),
        ("nccl_trace_rank_3", ""),
        ("rank-3.py-spy.json", ""),
        ("error.json", ""),
        ("logs.tar.gz", ""),
        (".py", ""),
    ],
)
def test_names(name, kind):
    assert kind_by_name(name) == kind


@pytest.mark.parametrize(
    ("name", "head", "size", "kind"),
    [
        ("x.pt", zip_with("x/data.pkl"), 1 << 30, "checkpoints"),
        ("model", zip_with("archive/data.pkl"), 1 << 30, "checkpoints"),
        ("pytorch_model.bin", b"\x00\x01\x02", 9, "checkpoints"),
        ("dump.pt", pickle.dumps({"entries": []}), 99, ""),
        ("shard-000.tar", tar_with("0001.jpg"), 1 << 28, "data"),
        ("logs.tar", tar_with("rank0.log"), 1 << 20, ""),
        ("logs.tar", tar_with("rank0.log"), LARGE_ARCHIVE + 1, "large archives"),
        ("logs.gz", gzip.compress(b"x", mtime=0), 1 << 20, ""),
        ("weights", b"abc\0def", 9, "data"),
        ("wide.log", "rank 0 failed".encode("utf-16-le"), 99, ""),
        ("notes.txt", b"hello", 99, ""),
        ("corpus.txt", b"once upon a time", LARGE + 1, "data"),
        ("corpus.jsonl", b'{"text": "x"}', LARGE + 1, "data"),
        ("large.txt", LOG, LARGE + 1, ""),
        ("large.log", b"step 1\n", LARGE + 1, ""),
        ("4", LOG, LARGE + 1, ""),
        ("trace.json", b'{"version": "2.5", "pg_config": {}, "entries": []}', LARGE + 1, ""),
    ],
)
def test_first_bytes(name, head, size, kind):
    assert kind_by_head(name, head, b"", size) == kind


def test_a_large_text_may_be_a_log_by_its_end():
    assert kind_by_head("large.txt", b"step 1\n", LOG, LARGE + 1) == ""


def test_a_walk_passes_over_them_without_reading_them(tmp_path):
    (tmp_path / "train.log").write_bytes(LOG)
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.npy").write_bytes(b"\x93NUMPY\0")
    for name in (".git", "venv"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.log").write_bytes(LOG)
    with (tmp_path / "model.pt").open("wb") as file:
        file.write(zip_with("model/data.pkl"))
        file.truncate(1 << 40)  # a terabyte that takes no room
    with (tmp_path / "corpus.txt").open("wb") as file:
        file.write(b"once upon a time")
        file.truncate(1 << 40)
    passed_over = Counter()
    entries = list(walk([tmp_path], passed_over=passed_over))
    assert [e.path for e in entries if isinstance(e, Dump)] == [f"{tmp_path}/train.log"]
    assert len(entries) == 1
    assert passed_over == {"sources": 1, "data": 2, "checkpoints": 1}


def test_a_file_that_is_named_is_read_whatever_it_is(tmp_path):
    (tmp_path / "train.py").write_bytes(LOG)
    (entry,) = walk([tmp_path / "train.py"])
    assert entry.data == LOG
