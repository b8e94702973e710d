"""Hydra's drafter (Ankner et al. 2024): every node is drafted given its own parent and all of that one's ancestors."""

from __future__ import annotations

from .network import HeadDrafter


class HydraDrafter(HeadDrafter):
    """The path to a node is the state that its row recycles, so that any tree of up to K levels grows as it is."""


DRAFTER = HydraDrafter
