"""Slots of several batches: which share a frame (groups.py), indices and tensors (slots.py), what is sent at once (sent.py)."""

from __future__ import annotations

from attnfuzz.oracles.slots.groups import grouped
from attnfuzz.oracles.slots.sent import bits_of, integers, sent
from attnfuzz.oracles.slots.slots import Flat, SlotFrame, Slots, flat, sinks_of

__all__ = ["Flat", "SlotFrame", "Slots", "bits_of", "flat", "grouped", "integers", "sent", "sinks_of"]
