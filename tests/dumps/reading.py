"""Read samples with one reader, as the tests of all readers do."""

from pathlib import Path

from distdiag.dumps.reading import UNKNOWN_RANK, Dump

SAMPLES = Path(__file__).parent / "samples"


def sample(name):
    """Return a sample file as a dump."""
    return Dump(path=name, data=(SAMPLES / name).read_bytes())


def text(*lines, path="train.log"):
    """Return a dump of these lines."""
    return Dump(path=path, data="\n".join(lines).encode())


def read(reader, dump):
    """Read a dump that the reader must recognise."""
    assert reader.recognises(dump)
    return list(reader.read(dump))


def events(reader, dump):
    """Return the events of a dump by rank, in order."""
    found = {}
    for rank_dump in read(reader, dump):
        rank = UNKNOWN_RANK if rank_dump.rank is None else rank_dump.rank
        assert {event.rank for event in rank_dump.events} <= {rank}
        assert (rank_dump.path, rank_dump.source) == (dump.path, reader.name)
        found.setdefault(rank_dump.rank, []).extend(rank_dump.events)
    return found


def lines_of(thread):
    """Return a stack as short strings, innermost first."""
    return [f"{Path(f.file).name}:{f.line} {f.function}" for f in thread.frames]
