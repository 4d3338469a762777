"""The contract of readers and their discovery."""

from distdiag.dumps.reading import load_readers


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
