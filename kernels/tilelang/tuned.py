"""The table of measured Configs, tuned.json: the fastest tiles by arch, dims, dtype and mask. benchmarks/tune.py makes it."""

from __future__ import annotations

import functools
from importlib import resources

import msgspec

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Problem

__all__ = ["ARCH", "NAMES", "Row", "Table", "config_of", "key_of", "rows", "tuned"]

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
    """Of everything tried, by "tile_m x tile_n threads stages"; 0 for what gave other values or did not compile."""


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
    """The rows of tuned.json; none where there is no such file."""
    file = resources.files("attnfuzz.kernels.tilelang") / "tuned.json"
    if not file.is_file():
        return {}
    return {key_of(row): row for row in msgspec.json.decode(file.read_bytes(), type=Table).rows}


def config_of(forward: tuple[int, int, int, int], backward: tuple[int, int, int, int]) -> Config:
    """A Config of (tile_m, tile_n, threads, stages) of each."""
    chosen = dict(zip(NAMES, forward, strict=True))
    return Config(chosen | {f"back_{name}": value for name, value in zip(NAMES, backward, strict=True)})


def tuned(table: str, problem: Problem, default: Config) -> Config:
    """The measured Config for `problem`; `default`'s part where a direction was not measured."""
    found = rows()
    values = dict(default)
    for of, part in ((table.split()[0], ""), (table, "back_")):
        row = found.get((of, ARCH, problem.dim_qk, problem.dim_v, problem.dtype, problem.causal is not None))
        if row is not None:
            values |= {part + name: value for name, value in zip(NAMES, row.best, strict=True)}
    return Config(values)
