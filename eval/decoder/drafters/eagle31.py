"""EAGLE-3.1's drafter; trees grow as EAGLE-3's do."""

from __future__ import annotations

from .network import HeadDrafter


class Eagle31Drafter(HeadDrafter):
    """The head recycles its own normed state and needs nothing beyond what every autoregressive head does."""


DRAFTER = Eagle31Drafter
