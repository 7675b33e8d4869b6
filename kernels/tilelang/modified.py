"""`tilelang.modified`: dense attention with softcap, window, score_mod and mask_mod, forward and backward, written in TileLang.

The device code is that of the other dense kernels, with the Problem's trees compiled in (`printer`): a mask_mod or a window hides
elements, never blocks, and only a causal mask bounds the loops. dK and dV of a group's query heads are added atomically.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from attnfuzz.kernels.contract import Config, Device
from attnfuzz.kernels.expressions.tree import Data, to_data
from attnfuzz.kernels.modified import score_of, whole_mask_of
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.tilelang.dense import TileLangDense
from attnfuzz.kernels.tilelang.subject import DeviceCode, Function

__all__ = ["KERNEL", "TileLangModified"]


class TileLangModified(TileLangDense):
    """A `contract.Kernel`; trees that read captured tensors are refused."""

    def __init__(self, name: str = "tilelang.modified", device_code: DeviceCode | None = None) -> None:
        super().__init__(name, "atomic", device_code, pipelined=False)
        self.capabilities = replace(self.capabilities, window=True, softcap=True, score_mod=True, mask_mod=True)
        self._host = (*self._host, "modified.py", "printer.py")

    @property
    def files(self) -> tuple[str, ...]:
        """The sources of this kernel, absolute paths."""
        return (*super().files, str(Path(__file__).parents[1] / "expressions" / "folding.py"))

    def functions(self, problem: Problem, config: Config, device: Device) -> dict[str, Function]:
        """forward, preprocess, backward; forward and backward with the trees, if any."""
        functions = super().functions(problem, config, device)
        for name in ("forward", "backward"):
            functions[name].options.update(_trees(problem))
        return functions

    def compile_key(self, problem: Problem, config: Config) -> str:
        """The key of the other dense kernels, and the trees, which contain a window's widths and its diagonal."""
        trees = (f"{name}={tree}" for name, tree in _trees(problem).items())
        return " ".join((super().compile_key(problem, config), *trees))


def _trees(problem: Problem) -> dict[str, Data | None]:
    """`score` and `mask` of the device code; neither where only a causal mask hides anything."""
    score, mask = score_of(problem), whole_mask_of(problem)
    if score is None and problem.mask_mod is None and problem.window in (None, (None, None)):
        return {}
    return {"score": None if score is None else to_data(score), "mask": None if mask is None else to_data(mask)}


KERNEL = TileLangModified()
