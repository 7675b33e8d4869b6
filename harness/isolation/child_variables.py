"""The environment variables of children, and of the processes from which they are forked."""

from __future__ import annotations

import os

from attnfuzz.kernels.contract import Device

__all__ = ["child_variables"]

# No fork survives a CUDA context, so whether there is a GPU must be asked without one; nor a pool of threads.
_FOR_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
_VARIABLES: dict[Device, dict[str, str]] = {
    "cpu": {**_FOR_FORKS, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    "cuda": _FOR_FORKS,
}
_ALLOCATOR, _SEGMENTS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
"""Variables of torch's allocator on a GPU, the second of older versions, and the setting by which it loses least memory between
tensors of many sizes: batches of many Cases then leave room for other workers."""


def child_variables(device: Device) -> dict[str, str]:
    """Return the environment variables of processes from which children for kernels on `device` are forked.

    The user's own setting of torch's allocator stays.
    """
    own = device != "cuda" or any(each in os.environ for each in _ALLOCATOR)
    return _VARIABLES[device] | ({} if own else dict.fromkeys(_ALLOCATOR, _SEGMENTS))
