from __future__ import annotations

import os

import pytest

from distdiag.probes.files.paths import MountTable, is_shared_type

TABLE = r"""
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
28 27 0:40 / /home rw,relatime shared:2 - nfs4 filer:/home rw,vers=4.2
29 28 0:41 / /home/me/scratch rw - xfs /dev/vdb rw
30 27 0:42 / /mnt/my\040data rw - lustre 10.0.0.1@o2ib:/fs rw
31 27 0:43 / /mnt/bucket rw - fuse.gcsfuse bucket rw
32 27 0:44 / /mnt/one rw - ext4 /dev/vdc rw
33 27 0:45 / /mnt/one rw - nfs filer:/one rw
a line that makes no sense
""".splitlines()


@pytest.mark.parametrize(
    ("folder", "is_shared"),
    [
        ("/tmp/", False),
        ("/home/me/", True),
        ("/homework/", False),
        ("/home/me/scratch/run/", False),
        ("/mnt/my data/x/", True),
        ("/mnt/bucket/", True),
        ("/mnt/one/x/", True),
    ],
)
def test_the_innermost_and_last_mount_decides(folder: str, is_shared: bool) -> None:
    assert MountTable(TABLE).is_shared(folder) is is_shared


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [
        ("overlay", False),
        ("tmpfs", False),
        ("fuseblk", False),
        ("fuse.fuse-overlayfs", False),
        ("fuse.sshfs", True),
        ("beegfs", True),
        ("cifs", True),
        ("", False),
    ],
)
def test_kinds_of_file_systems(kind: str, is_shared: bool) -> None:
    assert is_shared_type(kind) is is_shared


def test_without_a_table_everything_is_local() -> None:
    assert MountTable(()).is_shared("/data/") is False


def test_the_table_of_this_process_can_be_read() -> None:
    assert MountTable.of_this_process().is_shared(os.path.realpath("/proc") + "/") is False
