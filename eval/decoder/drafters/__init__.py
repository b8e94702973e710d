"""Drafters: everything that can propose a token tree. A head family's drafter is the module of its name here."""

from __future__ import annotations

import importlib

from ....heads.base import DraftHead, TargetParts
from ..search import Shape
from ..types import Drafter


def make_drafter(head: DraftHead, parts: TargetParts, shape: Shape, ready: DraftHead | None = None) -> Drafter:
    """Build the drafter of a head's family.

    Args:
        parts: the target's frozen pieces; their device and dtype are the decoder's.
        shape: the trees it grows.
        ready: `network.prepare_head(head, parts)`, where drafters that take turns share one.
    """
    module = importlib.import_module(f"{__name__}.{head.config.family}")
    drafter: Drafter = module.DRAFTER(head, parts, shape, ready)
    return drafter
