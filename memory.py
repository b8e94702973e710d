"""Memory of this process: its peak, and what it keeps although nobody uses it any more."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

_UNIT = 1 if sys.platform == "darwin" else 1024
_children_before = 0
"""The largest child's peak when the present measurement began: the system never forgets it."""


def peak_rss_bytes() -> int:
    """Peak resident memory since `begin_peak`, in bytes: of this process, or of a child that ended and was larger.

    A child that stayed below one from before `begin_peak` can't be told from it and doesn't count.
    """
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return _UNIT * max(_own_peak(), children if children > _children_before else 0)


def _own_peak() -> int:
    """In the system's unit; Linux's rusage keeps the peak of the program that started this one, its status doesn't."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def begin_peak() -> None:
    """Give freed pages back to the system and forget the peak so far, so that what follows has one of its own.

    Elsewhere than on Linux the peak only grows.
    """
    global _children_before
    _children_before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    give_back()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def give_back() -> None:
    """Give freed pages back to the system.

    glibc keeps them for the next allocation, and they count as the process's: 0.8 GB after the default target has
    answered.
    """
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
