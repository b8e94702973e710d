"""EAGLE-1's and HASS's drafter; with the shape `Dynamic` it is EAGLE-2's (arXiv 2406.16858)."""

from __future__ import annotations

from .network import HeadDrafter


class Eagle1Drafter(HeadDrafter):
    """The predicted feature stands for the target's behind a drafted token, as every recycled state does."""


DRAFTER = Eagle1Drafter
