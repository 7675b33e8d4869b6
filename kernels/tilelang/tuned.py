"""The table of measured Configs, tuned.json: the fastest tiles by arch, dims, dtype and mask. benchmarks/tune.py makes it."""

from __future__ import annotations

import functools
from importlib import resources

import msgspec

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Problem, reject

__all__ = ["ARCH", "NAMES", "Row", "Table", "config_of", "key_of", "read", "rows", "tuned"]

NAMES = ("tile_m", "tile_n", "threads", "stages")
ARCH = "sm_90a"
"""What the Hopper kernels are compiled for."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of one function."""

    of: str
    """"dense" or "ragged" for a forward; with how dK and dV leave, such as "dense atomic", for a backward."""
    arch: str
    dim_qk: int
    dim_v: int
    dtype: str
    causal: bool
    best: tuple[int, int, int, int]
    """By NAMES."""
    tflops: dict[str, float]
    """Of all that compiled, by "tile_m x tile_n threads stages"; 0 for what gave other values."""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """tuned.json."""

    device: str
    versions: dict[str, str]
    problem: str
    rows: tuple[Row, ...]


Key = tuple[str, str, int, int, str, bool]


def key_of(row: Row) -> Key:
    """What a Row is found by."""
    return (row.of, row.arch, row.dim_qk, row.dim_v, row.dtype, row.causal)


@functools.cache
def rows() -> dict[Key, Row]:
    """The rows of tuned.json; none where there is no such file.

    Raises:
        BadArgument: it is broken.
    """
    file = resources.files("attnfuzz.kernels.tilelang") / "tuned.json"
    return {key_of(row): row for row in read(file.read_bytes(), str(file)).rows} if file.is_file() else {}


def read(content: bytes, name: str) -> Table:
    """The table in a file of this name.

    Raises:
        BadArgument: it is none.
    """
    try:
        return msgspec.json.decode(content, type=Table)
    except msgspec.DecodeError as error:
        raise reject(
            "table", name, f"it is broken ({error})", "take it from the repository, or let benchmarks/tune.py write it anew"
        ) from None


def config_of(forward: tuple[int, int, int, int], backward: tuple[int, int, int, int]) -> Config:
    """A Config of (tile_m, tile_n, threads, stages) of each."""
    chosen = dict(zip(NAMES, forward, strict=True))
    return Config(chosen | {f"back_{name}": value for name, value in zip(NAMES, backward, strict=True)})


def tuned(table: str, problem: Problem, default: Config) -> Config:
    """The measured Config for `problem`; `default`'s part for a direction that was not measured."""
    found = rows()
    values = dict(default)
    for of, part in ((table.split()[0], ""), (table, "back_")):
        row = found.get((of, ARCH, problem.dim_qk, problem.dim_v, problem.dtype, problem.causal is not None))
        if row is not None:
            values |= {part + name: value for name, value in zip(NAMES, row.best, strict=True)}
    return Config(values)
