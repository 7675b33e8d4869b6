"""One call of an adapted function: from a Problem to its arguments, from its results to the contract's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from attnfuzz.kernels.adapters.lse_form import LseForm, with_sinks
from attnfuzz.kernels.adapters.signature import Signature
from attnfuzz.kernels.contract import Config, Gradients, Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch.ops import without_keys

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Running"]


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its calling convention and its kinds of results."""

    function: Callable[..., Any]
    own_backward: Callable[..., Any] | None
    signature: Signature
    lse: bool | Literal["auto"]
    layout: Literal["bshd", "bhsd", "thd"]
    by_autograd: bool
    lse_form: LseForm
    lse_has_sinks: bool = True
    pages: bool = False
    sinks_in_dtype: bool = False

    @property
    def gives_lse(self) -> bool:
        """Whether LSE comes with O."""
        return self.signature.option("return_lse") is not None if self.lse == "auto" else self.lse

    @property
    def has_gradients(self) -> bool:
        """Whether there is a backward."""
        return self.by_autograd or self.own_backward is not None

    def why_not(self, problem: Problem) -> str | None:
        """Why its parameters cannot express `problem`, though its kernel declares it; or None."""
        if problem.softmax_scale is not None and self.signature.option("softmax_scale") is None:
            return f"softmax_scale={problem.softmax_scale}: {self.signature.name} has no parameter for it"
        return None

    def tensors(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v; of a paged cache its pages."""
        if inputs.k_pages is None or inputs.v_pages is None:
            return inputs.q, inputs.k, inputs.v
        return inputs.q, inputs.k_pages, inputs.v_pages

    def sinks(self, inputs: Inputs) -> torch.Tensor | None:
        """The sinks as the function takes them: float32, or in q's dtype, which represents them exactly."""
        given = inputs.sinks
        return given.to(inputs.q.dtype) if given is not None and self.sinks_in_dtype else given

    def keywords(self, inputs: Inputs, config: Config, sinks: torch.Tensor | None = None) -> dict[str, Any]:
        """The keywords that `inputs.problem` needs, and no others, so that the function's defaults are tried too."""
        problem, signature = inputs.problem, self.signature
        left, right = problem.window or (None, None)
        # By option: whether the problem needs it, and its value.
        options: dict[str, tuple[bool, Any]] = {
            "softmax_scale": (problem.softmax_scale is not None, problem.scale),
            "causal": (problem.causal is not None, problem.causal is not None),
            "window_size": (problem.window is not None, (-1 if left is None else left, -1 if right is None else right)),
            "softcap": (bool(problem.softcap), problem.softcap),
            "sinks": (problem.sinks, sinks),
            "page_table": (self.pages, inputs.page_table),
            "seqlens_k": (self.pages, inputs.seqlens_k),
            "return_lse": (self.gives_lse, self.gives_lse),
        }
        arguments = {
            name: value
            for option, (needed, value) in options.items()
            if (name := signature.option(option)) and (needed or name in signature.required)
        }
        if self.layout == "thd":
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            arguments |= {name: getattr(inputs, name) for name in names if name in signature.parameters}
        return arguments | {name: value for name, value in config.items() if name in signature.parameters}


class Running:
    """A Built that keeps the autograd graph of its forward for its backward."""

    def __init__(self, call: Call, config: Config, *, contiguous: bool) -> None:
        self._call, self._config, self._contiguous = call, config, contiguous
        self._kept: Any = None

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """O, and LSE where the function returns it."""
        import torch

        call, graph = self._call, self._call.by_autograd and self._call.own_backward is None
        qkv = [self._turned(x.detach()).requires_grad_(graph) for x in call.tensors(inputs)]
        sinks = call.sinks(inputs)
        if sinks is not None:
            qkv.append(sinks := sinks.detach().requires_grad_(graph))
        with torch.set_grad_enabled(graph):
            result = call.function(*qkv[:3], **call.keywords(inputs, self._config, sinks))
            o, *more = result if isinstance(result, tuple | list) else (result,)
            own = lse = more[0] if call.gives_lse and more else None
            if isinstance(lse, torch.Tensor) and not call.lse_form.is_plain(inputs.problem.packing):
                lse = call.lse_form.natural(lse, inputs)
            if isinstance(lse, torch.Tensor) and inputs.sinks is not None and not call.lse_has_sinks:
                lse = with_sinks(lse, inputs.sinks if sinks is None else sinks.float())
        self._kept = qkv, o, lse, own
        if isinstance(lse, torch.Tensor):
            lse = without_keys(lse.detach())
        return self._back(o.detach()) if isinstance(o, torch.Tensor) else o, lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """(dq, dk, dv) by autograd of the last `forward`, or by the function passed as `backward`; and the gradient of sinks."""
        import torch

        call, (qkv, own_o, own_lse, returned) = self._call, self._kept
        d_o = self._turned(inputs.d_o)
        if call.own_backward is not None:
            keywords = call.keywords(inputs, self._config, qkv[3].detach() if inputs.sinks is not None else None)
            keywords.pop(call.signature.option("return_lse") or "", None)
            tensors = [x.detach() for x in qkv[:3]]
            if lse is not None and not call.lse_form.is_plain(inputs.problem.packing):
                lse = returned
            dq, dk, dv, *more = call.own_backward(d_o, *tensors, self._turned(o), lse, **keywords)
        else:
            if not own_o.requires_grad:
                name = call.signature.name
                raise RuntimeError(f"{name} returns an O without a graph: adapt it with gradients=False, or give it a backward")
            outputs, incoming = [own_o], [d_o]
            if inputs.d_lse is not None:
                outputs, incoming = [own_o, own_lse], [d_o, inputs.d_lse]
            # Retained: backward may be called again after the same forward.
            dq, dk, dv, *more = torch.autograd.grad(outputs, qkv, incoming, retain_graph=True)
        gradients = self._back(dq), self._back(dk), self._back(dv)
        return gradients if inputs.sinks is None else (*gradients, tuple(more))

    @property
    def has_graph(self) -> bool:
        """Whether autograd can go back from the O of the last `forward`."""
        import torch

        o = None if self._kept is None else self._kept[1]
        return isinstance(o, torch.Tensor) and o.requires_grad

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as the function takes it: a contiguous copy, unless the kernel declares that it reads any strides."""
        import torch

        if self._call.layout != "bhsd":
            return x
        turned = x.transpose(1, 2)
        # torch.empty, not contiguous(): the harness puts guard bands round what torch.empty allocates.
        return torch.empty(turned.shape, dtype=x.dtype, device=x.device).copy_(turned) if self._contiguous else turned

    def _back(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) if self._call.layout == "bhsd" else x
