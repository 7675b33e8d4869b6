"""The form in which a function returns LSE, and its conversion to the contract's: natural logarithm, heads before tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.errors import reject

if TYPE_CHECKING:
    import torch

__all__ = ["DenseLse", "LseForm", "RaggedLse", "with_sinks"]

DenseLse = Literal["bhs", "bsh"]
"""(batch, heads, seqlen_q), the contract's, or (batch, seqlen_q, heads)."""
RaggedLse = Literal["ht", "th", "bhs", "bsh"]
"""(heads, total_q), the contract's, (total_q, heads), or padded: (batch, heads, max_seqlen_q), (batch, max_seqlen_q, heads)."""


@dataclass(frozen=True, slots=True)
class LseForm:
    """Base of the logarithm, order of dimensions, and what the dimension of tokens is padded to.

    Raises:
        BadArgument: there is no such base, order or multiple.
    """

    layout: DenseLse | RaggedLse
    base: float = math.e
    multiple: int = 1

    def __post_init__(self) -> None:
        if not (isinstance(self.base, int | float) and math.isfinite(self.base) and self.base > 1):
            raise reject("lse_base", self.base, "the base of a logarithm is a number beyond 1", "give 2, or leave it out for e")
        if type(self.multiple) is not int or self.multiple < 1:
            raise reject("lse_multiple", self.multiple, "rows are padded to a multiple of 1 or more", "give a whole number")

    @staticmethod
    def of(packing: Literal["dense", "ragged"], layout: Any, base: float, multiple: int) -> LseForm:
        """Check and return the form; `layout` None is the contract's."""
        orders = get_args(DenseLse if packing == "dense" else RaggedLse)
        if layout is None:
            layout = orders[0]
        if layout not in orders:
            raise reject("lse_layout", layout, f"a {packing} LSE has no such order", f"use {' or '.join(map(repr, orders))}")
        return LseForm(layout, base, multiple)

    def is_plain(self, packing: Literal["dense", "ragged"]) -> bool:
        """Whether it is the contract's."""
        return self == LseForm("bhs" if packing == "dense" else "ht")

    def natural(self, lse: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Return LSE as the contract has it, differentiable; slack rows of a padded one are -inf.

        Raises:
            ValueError: its shape is another than the form says.
        """
        ragged = inputs.problem.packing == "ragged"
        rows = inputs.q.shape[0] if self.layout in ("ht", "th") else inputs.max_seqlen_q if ragged else inputs.q.shape[1]
        padded, heads, batch = -(-rows // self.multiple) * self.multiple, inputs.problem.heads, inputs.problem.batch
        sizes = {"b": batch, "h": heads, "s": padded, "t": padded}
        expected = tuple(sizes[axis] for axis in self.layout)
        if tuple(lse.shape) != expected:
            form = f"lse_layout={self.layout!r}, lse_multiple={self.multiple}"
            raise ValueError(f"LSE has the shape {tuple(lse.shape)} where {expected} is expected of {form}")
        if self.layout in ("th", "bsh"):
            lse = lse.transpose(-1, -2)
        lse = lse[..., :rows]
        if ragged and self.layout in ("bhs", "bsh"):
            lse = _joined(lse, inputs)
        return lse if self.base == math.e else lse * math.log(self.base)


def with_sinks(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return an LSE of keys alone, heads before tokens, with the sinks `(heads,)`: log(exp(LSE) + exp(sink)), differentiable.

    +inf, as some functions have it in a row that sees no key, is read as -inf.
    """
    import torch

    keys = lse.masked_fill(lse == math.inf, -math.inf)
    return torch.logaddexp(keys, sinks[:, None].expand_as(lse))


def _joined(lse: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return (batch, heads, max_seqlen_q) as (heads, total_q + slack_q)."""
    import torch

    problem = inputs.problem
    parts = [lse[index, :, :length] for index, length in enumerate(problem.seqlens_q)]
    slack = lse.new_full((problem.heads, inputs.q.shape[0] - problem.total_q), -math.inf)
    return torch.cat([*parts, slack], 1)
