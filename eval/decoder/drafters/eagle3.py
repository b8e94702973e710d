"""EAGLE-3's drafter; with the shape `Dynamic` its trees are the published ones (arXiv 2503.01840)."""

from __future__ import annotations

from .network import HeadDrafter


class Eagle3Drafter(HeadDrafter):
    """The head recycles its own state and needs nothing beyond what every autoregressive head does."""


DRAFTER = Eagle3Drafter
