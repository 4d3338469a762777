import pytest

SILENCED = {
    "everything": "dist.barrier()  # distdiag: ignore",
    "this code": "dist.barrier()  # distdiag: ignore[COL009]",
    "this name": "dist.barrier()  #distdiag:ignore[rank-guarded-collective]",
    "one of several": "dist.barrier()  # noqa  # distdiag: ignore[BAR001, col009]",
    "a call of several lines": "dist.barrier(\n        )  # distdiag: ignore[COL009]",
}
LOUD = {
    "another code": "dist.barrier()  # distdiag: ignore[BAR001]",
    "no code": "dist.barrier()  # distdiag: ignore[]",
    "another tool": "dist.barrier()  # noqa: COL009",
    "the line before": "pass  # distdiag: ignore\n    dist.barrier()",
}


@pytest.mark.parametrize("line", SILENCED.values(), ids=SILENCED)
def test_a_comment_silences_a_finding(lint, line):
    assert lint("COL009", f"if rank == 0:\n    {line}\n") == []


@pytest.mark.parametrize("line", LOUD.values(), ids=LOUD)
def test_other_comments_silence_nothing(lint, line):
    assert len(lint("COL009", f"if rank == 0:\n    {line}\n")) == 1
