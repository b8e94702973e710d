"""A stage's peak memory is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_a_peak_is_forgotten():
    program = f"""
from draftsmith.memory import begin_peak, peak_rss_bytes
begin_peak()
before = peak_rss_bytes()
many = [bytes(1000) for _ in range({200 * MIB // 1000})]  # small pieces, which the heap keeps when they are freed
assert peak_rss_bytes() > before + {190 * MIB}
del many
begin_peak()
assert peak_rss_bytes() < before + {40 * MIB}, (peak_rss_bytes(), before)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_child_counts_for_the_stage_that_it_ran_in():
    program = f"""
import subprocess, sys
from draftsmith.memory import begin_peak, peak_rss_bytes
begin_peak()
size = peak_rss_bytes() + {100 * MIB}
subprocess.run([sys.executable, "-c", f"x = b'1' * {{size}}"], check=True)
assert peak_rss_bytes() > size
begin_peak()
assert peak_rss_bytes() < size
"""
    subprocess.run([sys.executable, "-c", program], check=True)
