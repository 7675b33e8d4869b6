"""Slots of several batches: which share a frame (groups.py), indices and tensors (slots.py), what is sent at once (sent.py)."""

from __future__ import annotations

from attnfuzz.oracles.slots.groups import grouped
from attnfuzz.oracles.slots.sent import integers, reals_sent, sent
from attnfuzz.oracles.slots.slots import Flat, SlotFrame, Slots, flat, sinks_of

__all__ = ["Flat", "SlotFrame", "Slots", "flat", "grouped", "integers", "reals_sent", "sent", "sinks_of"]
