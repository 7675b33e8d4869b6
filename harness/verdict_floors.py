"""How often the verdict must find each planted numeric fault, and when a measured rate is below that.

The rates are those measured with the criterion's prototype before this code was written: per cent of single cases in which the
fault changed a bit, on plain normal cases (50 drawn) and on cases of 27 families of values (93 drawn; the rates with R and z are
of 129, whose number of changed cases was not kept and is taken in proportion). `element` counts the interval rule on all five
outputs, `every` the aggregate tests R and z as well; where R and z were not measured anew, `every` is `element`.

A rate of some dozen cases has an error of its own: 36 per cent of 50 is anything from 25 to 49. So a rate is *below its floor*
where it is below `Floor.limit`, a one-sided lower confidence limit (Clopper and Pearson 1934) of the floor at the number of cases
of which it was measured, or of which it is measured now where those are fewer.

That is 95 per cent for each figure by itself: 100 per cent of 50 may fall to 94.2. Which 93 mixed cases were drawn was not kept;
other ones of the same families give other rates, a few per cent up or down, so that of 72 such figures some fall below by chance
alone. They are told all the same: a floor is not lowered by what was measured after it.

Every report shows both numbers and the limit, and marks what lies between limit and floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["FLOORS", "Floor", "lower_limit"]

_CONFIDENCE: Final = 0.95
_MIXED, _MIXED_EVERY = 93, 129


@dataclass(frozen=True, slots=True)
class Floor:
    """Rates of one fault in one table, in per cent of `cases`."""

    cases: int
    element: int
    every_measured: int | None = None
    every_cases: int | None = None

    @property
    def every(self) -> int:
        """The rate with R and z: what finds an element finds it there too."""
        return self.element if self.every_measured is None else self.every_measured

    def limit(self, *, every: bool, cases: int) -> float:
        """The least rate, in per cent, that is not below this floor, where `cases` are measured now."""
        rate = self.every if every else self.element
        measured = self.every_cases if every and self.every_cases else self.cases
        n = min(measured, cases)
        return 100 * lower_limit(round(rate * n / 100), n, 1 - _CONFIDENCE)


def lower_limit(hits: int, cases: int, error: float = 1 - _CONFIDENCE) -> float:
    """The least chance of a hit with which `hits` or more of `cases` still come about in a share `error` of all tries."""
    if hits <= 0:
        return 0.0
    low, high = 0.0, hits / cases
    for _ in range(60):
        middle = (low + high) / 2
        as_many = sum(math.comb(cases, k) * middle**k * (1 - middle) ** (cases - k) for k in range(hits, cases + 1))
        low, high = (low, middle) if as_many > error else (middle, high)
    return low


def _mixed(cases: int, element: int, every: int | None = None) -> Floor:
    return Floor(cases, element, every, None if every is None else round(cases * _MIXED_EVERY / _MIXED))


FLOORS: Final[dict[str, tuple[Floor, Floor]]] = {
    "P_bf16_fwd": (Floor(30, 100), _mixed(40, 98)),
    "P_bf16_bwd": (Floor(30, 100), _mixed(44, 91)),
    "dS_bf16": (Floor(30, 100, 100), _mixed(45, 80, 82)),
    "out_via_bf16": (Floor(30, 100), _mixed(48, 98)),
    "delta_bf16O": (Floor(30, 97), _mixed(46, 89)),
    "scale_1pct_all": (Floor(50, 100), _mixed(89, 90)),
    "scale_1pct_bwdS": (Floor(50, 100), _mixed(82, 95)),
    "dQdK_scale_1pct": (Floor(50, 100), _mixed(90, 82, 84)),
    "dQdK_scale_0.1pct": (Floor(50, 60, 88), _mixed(89, 39, 48)),
    "drop_key_fwdbwd": (Floor(48, 100), _mixed(80, 100)),
    "drop_key_bwd": (Floor(48, 100), _mixed(80, 100)),
    "drop_key_dQ": (Floor(48, 100), _mixed(76, 82)),
    "norescale_O": (Floor(44, 98), _mixed(34, 91)),
    "norescale_l": (Floor(44, 98), _mixed(36, 92)),
    "delta_prod_half": (Floor(50, 36, 36), _mixed(89, 51, 55)),
    "delta_stored_half": (Floor(50, 42, 42), _mixed(91, 56, 54)),
    "delta_lastrow_0": (Floor(50, 98), _mixed(90, 99)),
    "lse_nomax": (Floor(50, 66), _mixed(89, 70)),
    "O_lastrow_missing": (Floor(50, 100), _mixed(92, 100)),
    "bwd_lastrow_missing": (Floor(50, 100), _mixed(92, 100)),
    "QK_half_acc": (Floor(50, 100), _mixed(85, 91)),
    "PV_half_acc": (Floor(50, 100), _mixed(83, 87)),
    "dV_half_acc": (Floor(50, 100), _mixed(83, 70, 70)),
    "LSE_stored_half": (Floor(50, 100), _mixed(93, 99)),
    "S_rounded_half": (Floor(50, 100), _mixed(85, 91)),
    "O_truncated": (Floor(50, 100), _mixed(87, 80, 81)),
    "P_truncated": (Floor(50, 96, 100), _mixed(88, 78, 82)),
    "pad_keys_unmasked": (Floor(28, 96), _mixed(64, 95)),
    "dQ_tile_add_lost": (Floor(42, 100), _mixed(45, 87)),
    "dQ_half_atomics": (Floor(43, 72, 91), _mixed(45, 18, 20)),
    "dKdV_split_half": (Floor(37, 22, 73), _mixed(52, 29, 36)),
    "dKdV_seq_half": (Floor(37, 51, 84), _mixed(53, 34, 41)),
    "l_from_rounded_P": (Floor(50, 100), _mixed(80, 84)),
    "log2e_1.4424_all": (Floor(35, 100), _mixed(59, 86)),
    "log2e_1.4424_bwd": (Floor(35, 60, 89), _mixed(55, 55, 63)),
    "causal_edge_off1": (Floor(20, 100), _mixed(16, 100)),
}
"""Per fault: plain cases, mixed cases."""
