"""Faults of the protocol among warp roles: what an executor of roles reports. No backend needed."""

from __future__ import annotations

import re
from typing import Literal, get_args

__all__ = ["PROTOCOL_KINDS", "ProtocolFault", "ProtocolKind"]

ProtocolKind = Literal["deadlock", "wrong-phase", "early-overwrite", "early-read", "wrong-bytes", "left-running"]
"""deadlock: roles wait without end. wrong-phase: a wait takes another phase than the one that was meant. early-overwrite: memory
is written before it was read. early-read: memory is read before it was written. wrong-bytes: a barrier expects other bytes than
its copies have. left-running: an asynchronous operation is not waited for by anyone."""
PROTOCOL_KINDS: tuple[ProtocolKind, ...] = get_args(ProtocolKind)


class ProtocolFault(Exception):
    """Error for roles that do not wait for each other as they must.

    Args:
        kind: what is wrong.
        role: the role that should have waited, or that waits in vain.
        barrier: the mbarrier that would have ordered them, such as "k_free[1]"; "" where there is none.
        stage: the stage of the pipeline, 0 where there is one only.
        iteration: value of the role's outermost loop.
        message: both steps in words.
    """

    def __init__(self, kind: ProtocolKind, role: str, barrier: str, stage: int, iteration: int, message: str) -> None:
        where = f"{role}, {f'barrier {barrier}' if barrier else 'no barrier'}, stage {stage}, iteration {iteration}"
        super().__init__(f"{where}: {message}")
        self.kind: ProtocolKind = kind
        self.role, self.barrier, self.stage, self.iteration, self.reason = role, barrier, stage, iteration, message

    @property
    def check(self) -> str:
        """Role and barrier without numbers, the same for all Cases."""
        barrier = re.sub(r"\[\d+\]", "", self.barrier)
        return f"{self.role.split(' ')[0]}{f' at {barrier}' if barrier else ''}"
