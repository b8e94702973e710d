"""Medusa-2's drafter: Medusa's, for a target that was loaded with the head's adapter."""

from __future__ import annotations

from .medusa import MedusaDrafter

DRAFTER = MedusaDrafter
