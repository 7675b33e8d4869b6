"""A kernel with sinks, right in each head, with a hook that changes what it takes for the sink."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.oracles import attention

Change = Callable[[dict[str, torch.Tensor]], None]


def kernel(inputs: Inputs, *, first: bool, change: Change = lambda _: None) -> Outputs:
    """A right kernel of sums in float32, P and dS rounded once; `first`: the sink is in the maximum from the start."""
    p, sinks, dtype = inputs.problem, inputs.sinks, inputs.q.dtype
    assert sinks is not None
    dense = p.packing == "dense"
    out = {name: torch.zeros(x.shape) for name, x in (("o", inputs.d_o), ("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v))}
    rows = inputs.q.shape[1] if dense else inputs.q.shape[0]
    out["lse"] = torch.zeros((p.batch, p.heads, rows) if dense else (p.heads, rows))
    out["d_sinks"] = torch.zeros(p.heads)
    at_q = at_k = 0
    for b, (n, m) in enumerate(zip(p.seqlens_q, p.seqlens_k, strict=True)):
        visible = attention.visible_keys(p, b)
        at, of_keys = ((b, slice(n)), (b, slice(m))) if dense else (slice(at_q, at_q + n), slice(at_k, at_k + m))
        of_lse = (lambda h, b=b, n=n: (b, h, slice(n))) if dense else (lambda h, at=at: (h, at))
        for h in range(p.heads):
            q, do = (x[at][:, h].float() for x in (inputs.q, inputs.d_o))
            k, v = (x[of_keys][:, h // p.groups].float() for x in (inputs.k, inputs.v))
            part = {"sink": sinks[h], "in_lse": sinks[h], "in_gradient": sinks[h]}
            change(part)
            s = (q @ k.T * p.scale).masked_fill(~visible, -math.inf)
            most = s.amax(-1) if m else torch.full((n,), -math.inf)
            start = torch.maximum(most, part["sink"]) if first else most
            x = (s - torch.where(start == -math.inf, 0.0, start)[:, None]).exp()
            top = torch.maximum(most, part["sink"])
            rescale = torch.where(start == -math.inf, 0.0, (start - top).exp())
            total = x.sum(-1) * rescale + (part["sink"] - top).exp()
            o = ((x.to(dtype).float() @ v) * (rescale / total)[:, None]).to(dtype).float()
            lse = torch.logaddexp(torch.where(x.sum(-1) > 0, start + x.sum(-1).log(), -math.inf), part["in_lse"])
            delta = (o * do).sum(-1)
            if inputs.d_lse is not None:
                delta = delta - inputs.d_lse[of_lse(h)]
            prob = (s - lse[:, None]).exp()
            ds = (prob * (do @ v.T - delta[:, None])).to(dtype).float()
            out["o"][at][:, h], out["lse"][of_lse(h)] = o, lse
            out["dq"][at][:, h] = ds @ k * p.scale
            out["dk"][of_keys][:, h // p.groups] += ds.T @ q * p.scale
            out["dv"][of_keys][:, h // p.groups] += prob.to(dtype).float().T @ do
            out["d_sinks"][h] -= ((part["in_gradient"] - lse).exp() * delta).sum() * part.get("sign", torch.tensor(1.0))
        at_q, at_k = at_q + n, at_k + m
    return Outputs(
        **{name: out[name].to(dtype) for name in ("o", "dq", "dk", "dv")}, lse=out["lse"], d_captured=(out["d_sinks"],)
    )
