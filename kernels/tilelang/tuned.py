"""Table of measured Configs, tuned.json: the fastest tiles by arch, dims, dtype and mask. benchmarks/tune.py writes it."""

from __future__ import annotations

import functools
from importlib import resources

import msgspec

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.problem import Problem

__all__ = ["ARCH", "NAMES", "Row", "Table", "config_of", "key_of", "read", "rows", "tuned"]

NAMES = ("tile_m", "tile_n", "threads", "stages")
ARCH = "sm_90a"
"""The architecture that the Hopper kernels are compiled for."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of one function."""

    of: str
    """"dense" or "ragged" for a forward; for a backward also the reduction of dK and dV, such as "dense atomic"."""
    arch: str
    dim_qk: int
    dim_v: int
    dtype: str
    causal: bool
    best: tuple[int, int, int, int]
    """Values in the order of NAMES."""
    tflops: dict[str, float]
    """Speed of all Configs that compiled, by "tile_m x tile_n threads stages"; 0 for those whose results differed."""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of tuned.json."""

    device: str
    versions: dict[str, str]
    problem: str
    rows: tuple[Row, ...]


Key = tuple[str, str, int, int, str, bool]


def key_of(row: Row) -> Key:
    """The key of a Row in `rows`."""
    return (row.of, row.arch, row.dim_qk, row.dim_v, row.dtype, row.causal)


@functools.cache
def rows() -> dict[Key, Row]:
    """Read the rows of tuned.json; none where there is no such file.

    Raises:
        BadArgument: the file is broken.
    """
    file = resources.files("attnfuzz.kernels.tilelang") / "tuned.json"
    return {key_of(row): row for row in read(file.read_bytes(), str(file)).rows} if file.is_file() else {}


def read(content: bytes, name: str) -> Table:
    """Read the table from the `content` of the file `name`.

    Raises:
        BadArgument: the content is not a table.
    """
    try:
        return msgspec.json.decode(content, type=Table)
    except msgspec.DecodeError as error:
        raise reject(
            "table", name, f"it is broken ({error})", "restore it from the repository, or let benchmarks/tune.py write it again"
        ) from None


def config_of(forward: tuple[int, int, int, int], backward: tuple[int, int, int, int]) -> Config:
    """Make a Config from (tile_m, tile_n, threads, stages) of forward and backward."""
    chosen = dict(zip(NAMES, forward, strict=True))
    return Config(chosen | {f"back_{name}": value for name, value in zip(NAMES, backward, strict=True)})


def tuned(table: str, problem: Problem, default: Config) -> Config:
    """The measured Config for `problem`, with `default`'s part for a direction that was not measured."""
    measured = rows()
    values = dict(default)
    for of, part in ((table.split()[0], ""), (table, "back_")):
        row = measured.get((of, ARCH, problem.dim_qk, problem.dim_v, problem.dtype, problem.causal is not None))
        if row is not None:
            values |= {part + name: value for name, value in zip(NAMES, row.best, strict=True)}
    return Config(values)
