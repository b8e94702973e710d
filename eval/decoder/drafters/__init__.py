"""Drafters: everything that can propose a token tree. A head family's drafter is the module of its name here."""

from __future__ import annotations

import importlib

from torch import Tensor

from ....heads.base import DraftHead
from ..search import Shape
from ..types import Drafter


def make_drafter(head: DraftHead, embed: Tensor, shape: Shape) -> Drafter:
    """Build the drafter of a head's family.

    Args:
        embed: [V, H] the target's input embedding; its device and dtype are the decoder's.
        shape: the trees it grows.
    """
    module = importlib.import_module(f"{__name__}.{head.config.family}")
    drafter: Drafter = module.DRAFTER(head, embed, shape)
    return drafter
