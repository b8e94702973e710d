"""Triton kernels of the decoder. Each has a PyTorch twin in `eval/decoder`, which is the CPU path and the oracle.

| kernel | twin |
|---|---|
| `tree_attention.tree_attention` | `attention.tree_attention` in a `TreeCache` step |
| `verification.verify_greedy`, `verification.verify_sampled` | `verify.walk` with the choices of `verify.verify` |
| `compaction.compact` | `TreeCache.keep` |

Importing this package loads nothing; its modules need Triton, so import them where `usable` says yes.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

LARGEST_HEAD = 256
"""Numbers of a head's keys or values that the attention kernel can hold: there are tile sizes up to there."""


def usable(device: torch.device) -> bool:
    """Whether the kernels run on tensors of this device.

    They need Triton and a CUDA device. Triton's interpreter runs them on CPU tensors, slowly, if TRITON_INTERPRET=1 was
    set before Triton was first imported: that is for tests.
    """
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
