"""Which processes of a file are ranks, and what those are called whose rank nothing tells."""

from distdiag.dumps.stacks.native_text import NativeText
from distdiag.dumps.stacks.stack_text import DumpedProcess, python_frame, rank_dumps
from distdiag.events.stacks import ThreadStack
from tests.dumps.reading import events, lines_of, text

WORKER = "/opt/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py"


def process(pid, *frames, title="", rank=None):
    stack = tuple(python_frame(file, str(line), name) for file, line, name in frames)
    return DumpedProcess((ThreadStack("MainThread", stack),), pid, title, rank)


def rank(pid, title="", number=None):
    return process(pid, ("train.py", 31, "step"), title=title, rank=number)


def worker(pid):
    return process(pid, (WORKER, 349, "_worker_loop"))


def dumps(*processes, path="stacks.txt"):
    return list(rank_dumps(processes, path, "py-spy-text"))


def test_processes_are_called_by_their_numbers():
    assert [dump.label for dump in dumps(rank(7), rank(8))] == ["pid 7", "pid 8"]


def test_a_place_in_the_title_is_the_name_where_it_tells_them_apart():
    first, second = dumps(rank(7, "vllm::Worker_TP0"), rank(8, "vllm::Worker_TP1"))
    assert (first.label, second.label) == ("TP0", "TP1")
    first, second = dumps(rank(7, "vllm::Worker_TP0"), rank(8, "vllm::Worker_TP0"))
    assert (first.label, second.label) == ("TP0 (pid 7)", "TP0 (pid 8)")


def test_without_a_number_the_file_is_the_name():
    assert [dump.label for dump in dumps(rank(None), path="a/b.txt")] == ["b.txt"]
    labels = [dump.label for dump in dumps(rank(None), rank(None), path="a/b.txt")]
    assert labels == ["process 1 in b.txt", "process 2 in b.txt"]


def test_helpers_beside_ranks_are_left_out():
    assert [dump.pid for dump in dumps(rank(7), worker(8), rank(9))] == [7, 9]
    titles = ("sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer")
    assert [dump.pid for dump in dumps(*(rank(n, t) for n, t in enumerate(titles)))] == [0, 1]


def test_a_helper_alone_is_reported_as_such():
    (dump,) = dumps(worker(8))
    assert dump.events[0].error == "it is a worker of a data loader, and no rank"


LLDB = """\
(lldb) process attach --pid 4711
Process 4711 stopped
* thread #1, name = 'python', stop reason = signal SIGSTOP
  * frame #0: 0x00007f10 libc.so.6`__futex_abstimed_wait_common + 200
    frame #1: 0x00007f11 libtorch_cpu.so`c10d::Work::wait(this=0x1, t=(r = 1)) at Work.cpp:77:5
    frame #2: 0x00007f12 libtorch_cpu.so`std::function<void (int)>::operator()(int) const + 8
  thread #2, tid = 4712, name = 'pt_autograd_0'
    frame #0: 0x00007f10 libc.so.6`read + 20
"""


def test_lldb_is_read():
    (found,) = events(NativeText(), text(*LLDB.splitlines()))[None]
    main, other = found.threads
    assert (main.name, other.name) == ("MainThread", "pt_autograd_0 4712")
    assert lines_of(main) == [
        "libc.so.6:0 __futex_abstimed_wait_common",
        "Work.cpp:77 c10d::Work::wait",
        "libtorch_cpu.so:0 std::function<void (int)>::operator()",
    ]


def test_lldb_tells_the_process():
    (dump,) = NativeText().read(text(*LLDB.splitlines()))
    assert (dump.pid, dump.label) == (4711, "pid 4711")
