"""The subjects under test, and the one contract they all fulfil. Public are the names below."""

from typing import TYPE_CHECKING

from attnfuzz.kernels.support.lazy import lazy

if TYPE_CHECKING:
    from attnfuzz.kernels.adapters import dense, paged, varlen
    from attnfuzz.kernels.contract import (
        BuildError,
        Built,
        Capabilities,
        Config,
        Deviations,
        Inputs,
        Kernel,
        Outputs,
        why_unsupported,
    )
    from attnfuzz.kernels.errors import BadArgument
    from attnfuzz.kernels.lowering import Lowers, MachineCode, Required, Unit
    from attnfuzz.kernels.problem import Layout, Needs, Problem
    from attnfuzz.kernels.registry import get, names, register
    from attnfuzz.kernels.support.process_setup import ProcessSetup
    from attnfuzz.kernels.torch.autograd import attention, attention_padded, attention_varlen

__all__ = [
    "BadArgument",
    "BuildError",
    "Built",
    "Capabilities",
    "Config",
    "Deviations",
    "Inputs",
    "Kernel",
    "Layout",
    "Lowers",
    "MachineCode",
    "Needs",
    "Outputs",
    "Problem",
    "ProcessSetup",
    "Required",
    "Unit",
    "attention",
    "attention_padded",
    "attention_varlen",
    "dense",
    "get",
    "names",
    "paged",
    "register",
    "varlen",
    "why_unsupported",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "attnfuzz.kernels.adapters": "dense paged varlen",
            "attnfuzz.kernels.torch.autograd": "attention attention_padded attention_varlen",
            "attnfuzz.kernels.contract": "BuildError Built Capabilities Config Deviations Inputs Kernel Outputs why_unsupported",
            "attnfuzz.kernels.errors": "BadArgument",
            "attnfuzz.kernels.lowering": "Lowers MachineCode Required Unit",
            "attnfuzz.kernels.problem": "Layout Needs Problem",
            "attnfuzz.kernels.registry": "get names register",
            "attnfuzz.kernels.support.process_setup": "ProcessSetup",
        },
    )
