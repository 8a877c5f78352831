"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
from moetriage.train.allocator import keep_freed_memory
kept = {keep}
if kept:
    assert keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(12):
    bytearray(b"x") * (40 << 20)  # more than glibc keeps of its own accord
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*, keep: bool) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(keep=keep)], capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_system_is_asked_for_memory_once() -> None:
    kept, returned = page_faults(keep=True), page_faults(keep=False)
    assert returned > 6 * kept
