import os
import subprocess
import sys
import time

from distdiag.dumps.process.tree import ProcessTree

PARENT = """
import subprocess, sys, time
busy = "import time\\nend = time.process_time() + 0.5\\nwhile time.process_time() < end: pass"
subprocess.run([sys.executable, "-c", busy])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open("/dev/null", "w") as file:
    file.write("x" * (1 << 20))
print("ready", flush=True)
sys.stdin.read()
child.kill()
"""


def test_what_descendants_use_counts_also_when_they_have_ended():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout.readline() == b"ready\n"
        use = ProcessTree(lambda: [parent.pid]).use_of(parent.pid)
        parent.stdin.close()
    assert use.num_children == 1
    assert use.children_cpu_s >= 0.4
    assert use.io_bytes >= 1 << 20


def test_a_root_below_another_one_is_no_part_of_its_family():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout.readline() == b"ready\n"
        alone = ProcessTree(lambda: [os.getpid()]).use_of(os.getpid())
        both = ProcessTree(lambda: [os.getpid(), parent.pid]).use_of(os.getpid())
        parent.stdin.close()
    assert alone.num_children - both.num_children == 2  # the other root, and what it has started


def test_the_table_of_processes_is_read_once_a_second_for_all():
    looks = []
    now = [0.0]

    def roots():
        looks.append(time.monotonic())
        return [os.getpid()]

    tree = ProcessTree(roots, lambda: now[0])
    tree.use_of(os.getpid())
    tree.use_of(4194305)
    assert len(looks) == 1
    now[0] = 1.0
    tree.use_of(os.getpid())
    assert len(looks) == 2
