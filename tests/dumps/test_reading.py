"""The contract of readers and their discovery."""

from distdiag.dumps.reading import UNKNOWN_RANK, RankDump, load_readers


def test_every_reader_is_found_once_by_its_name():
    names = [reader.name for reader in load_readers()]
    assert names == sorted(set(names))
    assert {
        "faulthandler",
        "native-text",
        "nccl-log",
        "py-spy-json",
        "py-spy-text",
        "torchelastic",
        "torchelastic-json",
        "traceback-text",
    } <= set(names)


def test_events_of_nobodys_dump_have_no_rank_of_a_job():
    assert RankDump(rank=None, events=(), path="a", source="b").event_rank == UNKNOWN_RANK < 0
    assert RankDump(rank=3, events=(), path="a", source="b").event_rank == 3
