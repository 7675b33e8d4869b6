"""Functions by adapter that `attnfuzz compile` captures: one that launches Triton functions, and ones that cannot be captured.

Device code is imported by the call alone: this process may interpret Triton.
"""

from typing import Any

from attnfuzz.kernels import dense


def _launching(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    import torch
    from support import adapted_device as device

    o = torch.empty_like(q)
    device.scaled[(1,)](q, o, 2.0, q.numel(), CAUSAL=causal, TILE=64, num_warps=2)
    device.scaled[(1,)](q, o, 2.0, q.numel(), CAUSAL=causal, TILE=64, num_warps=2)
    device.tuned[lambda options: (options["TILE"],)](o, o, 2.0, n=q.numel(), CAUSAL=causal)
    return o


def _on_gpus(q: Any, k: Any, v: Any) -> Any:
    assert q.is_cuda, "the GPU is needed"
    return q


def _without_launches(q: Any, k: Any, v: Any) -> Any:
    return q


_ALL: dict[str, Any] = {"backend": "triton", "gradients": False, "dtypes": ("float16",)}
LAUNCHING = dense(_launching, name="acme.launching", **_ALL)
ON_GPUS = dense(_on_gpus, name="acme.on_gpus", **_ALL)
WITHOUT = dense(_without_launches, name="acme.without_launches", **_ALL)
PLAIN = dense(_without_launches, name="acme.plain_torch", gradients=False)
