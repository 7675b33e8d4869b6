"""Tensors of small Cases between the device and the host, many by one copy.

A device operation costs about as much as a thousand elements do on the host, and each copy waits for all work before it: who
needs tensors elsewhere asks for a Move, and whoever runs several Cases at once fulfils the Moves of all by one copy.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Iterable, Sequence

import torch

from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName, Problem

__all__ = ["Move", "elements", "flat_bytes", "inputs_on_host", "is_remote", "launches_on_device", "moved", "outputs_on_host"]

_INPUTS = ("q", "k", "v", "d_o", "cu_seqlens_q", "cu_seqlens_k")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A request for contiguous copies of tensors on another device.

    `to`: the device; None: the host. `stage`: of the Trial that it belongs to. `outputs`: those of a kernel that are read later.
    """

    tensors: Sequence[torch.Tensor]
    stage: str
    to: torch.device | None = None
    outputs: Sequence[torch.Tensor] = ()


def is_remote(inputs: Inputs) -> bool:
    """Whether the tensors are on a device that runs beside the host."""
    return bool(inputs.q.device.type != "cpu")


def elements(problems: Iterable[Problem]) -> int:
    """Return how many elements the inputs and outputs of launches of `problems` have."""
    return sum(2 * (each.total_q * each.heads + each.total_k * each.kv_heads) * (each.dim_qk + each.dim_v) for each in problems)


def moved(moves: Sequence[Move]) -> list[list[torch.Tensor]]:
    """Return the copies that each Move asks for, by one operation and one copy between each two devices."""
    tensors = [(x, each.to) for each in moves for x in each.tensors]
    copies: dict[int, torch.Tensor] = {}
    for way in dict.fromkeys((x.device, to) for x, to in tensors):
        # Wide elements first, so that each tensor is aligned within the bytes of all.
        here = [at for at, (x, to) in enumerate(tensors) if (x.device, to) == way]
        here.sort(key=lambda at: -tensors[at][0].element_size())
        like = [tensors[at][0] for at in here]
        flat = _bytes(like)
        copies |= zip(here, _cut(_fetched(flat) if way[1] is None else _sent(flat, way[1]), like), strict=True)
    rest = (copies[at] for at in range(len(tensors)))
    return [list(itertools.islice(rest, len(each.tensors))) for each in moves]


def inputs_on_host(inputs: Inputs) -> Generator[Move, list[torch.Tensor], Inputs]:
    """Return the inputs of a relation's Case, which has no captured tensors, on the host."""
    copies = yield Move([getattr(inputs, name) for name in _INPUTS], "inputs")
    return dataclasses.replace(inputs, **dict(zip(_INPUTS, copies, strict=True)))


def outputs_on_host(
    launches: Sequence[tuple[Problem, Outputs]], others: Sequence[torch.Tensor] = ()
) -> Generator[Move, list[torch.Tensor], tuple[list[Outputs], list[torch.Tensor]]]:
    """Return the outputs that each Problem needs, and other tensors, on the host."""
    places = [(number, name) for number, (problem, outputs) in enumerate(launches) for name in _wanted(problem, outputs)]
    outputs = [getattr(launches[number][1], name) for number, name in places]
    copies = yield Move([*outputs, *others], "kernel", outputs=outputs)
    by_place = dict(zip(places, copies, strict=False))
    own = [
        Outputs(**{str(name): by_place.get((number, name)) for name in OUTPUT_NAMES}, d_captured=())
        for number in range(len(launches))
    ]
    return own, copies[len(places) :]


def launches_on_device(
    launches: Sequence[Inputs], copy: Inputs, original: Inputs
) -> Generator[Move, list[torch.Tensor], list[Inputs]]:
    """Return `launches`, made on the host of `copy`, on the device of `original`; each tensor has its own memory.

    Tensors that a launch took over from `copy` are those of `original`.
    """
    device_of = {id(getattr(copy, name)): getattr(original, name) for name in _INPUTS}
    own = {id(x): x for each in launches for name in _INPUTS if id(x := getattr(each, name)) not in device_of}
    if own:
        parts = yield Move(list(own.values()), "inputs", original.q.device)
        device_of |= {name: part.clone() for name, part in zip(own, parts, strict=True)}
    return [dataclasses.replace(each, **{name: device_of[id(getattr(each, name))] for name in _INPUTS}) for each in launches]


def _wanted(problem: Problem, outputs: Outputs) -> list[OutputName]:
    """Return the outputs that are compared, and LSE, which limits of others are made of."""
    return [name for name in OUTPUT_NAMES if name in problem.needs.outputs or (name == "lse" and outputs.lse is not None)]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as bytes, `(elements x element size,)`."""
    # A vector of a wider tensor is flat already, with its elements apart. One element counts as contiguous whatever its stride,
    # but a view of bytes wants a stride of 1.
    whole = tensor.detach().reshape(-1).contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([flat_bytes(each) for each in tensors])


def _cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of `flat` of the dtypes and shapes of `like`."""
    parts = flat.split([each.numel() * each.element_size() for each in like])
    return [part.view(each.dtype).view(each.shape) for part, each in zip(parts, like, strict=True)]


def _fetched(flat: torch.Tensor) -> torch.Tensor:
    return flat.cpu()


def _sent(flat: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Without pinned memory the driver takes its own copy at once: neither side waits.
    return flat.to(device, non_blocking=True)
