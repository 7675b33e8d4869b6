"""One call of an adapted function: a Problem as its arguments, what it gives as the contract's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from attnfuzz.kernels.adapters.signature import Signature
from attnfuzz.kernels.contract import Config, Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch.ops import without_keys

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Running"]


@dataclass(frozen=True, slots=True)
class Call:
    """How a function is called, and what it gives."""

    function: Callable[..., Any]
    own_backward: Callable[..., Any] | None
    signature: Signature
    lse: bool | Literal["auto"]
    layout: Literal["bshd", "bhsd", "thd"]
    by_autograd: bool

    @property
    def gives_lse(self) -> bool:
        """Whether LSE comes with O."""
        return self.signature.option("return_lse") is not None if self.lse == "auto" else self.lse

    @property
    def has_gradients(self) -> bool:
        """Whether there is a backward."""
        return self.by_autograd or self.own_backward is not None

    def why_not(self, problem: Problem) -> str | None:
        """Why its parameters cannot say `problem`, which its kernel declares; or None."""
        if problem.softmax_scale is not None and self.signature.option("softmax_scale") is None:
            return f"softmax_scale={problem.softmax_scale}: {self.signature.name} has no parameter for it"
        return None

    def keywords(self, inputs: Inputs, config: Config) -> dict[str, Any]:
        """What it is given besides q, k and v: what `inputs.problem` needs, so that its own defaults are tried as well."""
        problem, signature = inputs.problem, self.signature
        left, right = problem.window or (None, None)
        # Of each option whether the problem needs it said, and what is said.
        options: dict[str, tuple[bool, Any]] = {
            "softmax_scale": (problem.softmax_scale is not None, problem.scale),
            "causal": (problem.causal is not None, problem.causal is not None),
            "window_size": (problem.window is not None, (-1 if left is None else left, -1 if right is None else right)),
            "softcap": (bool(problem.softcap), problem.softcap),
            "return_lse": (self.gives_lse, self.gives_lse),
        }
        given = {
            name: value
            for option, (needed, value) in options.items()
            if (name := signature.option(option)) and (needed or name in signature.required)
        }
        if self.layout == "thd":
            for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
                given[name] = getattr(inputs, name)
        return given | {name: value for name, value in config.items() if name in signature.parameters}


class Running:
    """A Built: it keeps what its forward leaves for its backward, the autograd graph."""

    def __init__(self, call: Call, config: Config, *, contiguous: bool) -> None:
        self._call, self._config, self._contiguous = call, config, contiguous
        self._kept: Any = None

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """O, and LSE where the function gives it."""
        import torch

        call, graph = self._call, self._call.by_autograd and self._call.own_backward is None
        qkv = [self._turned(x.detach()).requires_grad_(graph) for x in (inputs.q, inputs.k, inputs.v)]
        with torch.set_grad_enabled(graph):
            found = call.function(*qkv, **call.keywords(inputs, self._config))
        o, *more = found if isinstance(found, tuple | list) else (found,)
        lse = more[0] if call.gives_lse and more else None
        self._kept = qkv, o, lse
        if isinstance(lse, torch.Tensor):
            lse = without_keys(lse.detach())
        return self._back(o.detach()) if isinstance(o, torch.Tensor) else o, lse

    def backward(
        self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """By autograd of the last `forward`, or by the function that was given for it."""
        import torch

        call, (qkv, own_o, own_lse) = self._call, self._kept
        d_o = self._turned(inputs.d_o)
        if call.own_backward is not None:
            keywords = call.keywords(inputs, self._config)
            keywords.pop(call.signature.option("return_lse") or "", None)
            given = [x.detach() for x in qkv]
            dq, dk, dv = call.own_backward(d_o, *given, self._turned(o), lse, **keywords)
        else:
            if not own_o.requires_grad:
                name = call.signature.name
                raise RuntimeError(f"{name} gives an O without a graph: adapt it with gradients=False, or give it a backward")
            outputs, incoming = [own_o], [d_o]
            if inputs.d_lse is not None:
                outputs, incoming = [own_o, own_lse], [d_o, inputs.d_lse]
            # Kept: the same forward may be asked for its gradients again.
            dq, dk, dv = torch.autograd.grad(outputs, qkv, incoming, retain_graph=True)
        return self._back(dq), self._back(dk), self._back(dv)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """As the function takes it. Contiguous, in memory of its own, unless the kernel declares that it reads any strides."""
        import torch

        if self._call.layout != "bhsd":
            return x
        turned = x.transpose(1, 2)
        # torch.empty, and not contiguous(): the harness puts bands of NaN round what that gives.
        return torch.empty(turned.shape, dtype=x.dtype, device=x.device).copy_(turned) if self._contiguous else turned

    def _back(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) if self._call.layout == "bhsd" else x
