"""MTP's drafter: one module that reads its own states, or one for each step (arXiv 2412.19437, 2509.18362)."""

from __future__ import annotations

from .network import HeadDrafter


class MtpDrafter(HeadDrafter):
    """A node at depth d is module d's row of the last committed position, or the one module's next row."""


DRAFTER = MtpDrafter
