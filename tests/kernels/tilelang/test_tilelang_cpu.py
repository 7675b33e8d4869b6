"""`tilelang.varlen` on the CPU: the rewrite for the C target, and the kernel against a small float64 attention."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("tilelang")
torch = pytest.importorskip("torch")

import tilelang.language as T  # noqa: E402, N812
from tvm import ir  # noqa: E402

from attnfuzz.kernels.contract import BuildError, Config, Inputs, Kernel  # noqa: E402
from attnfuzz.kernels.problem import Problem  # noqa: E402
from attnfuzz.kernels.tilelang import build, varlen_device  # noqa: E402
from attnfuzz.kernels.tilelang.build import compile_counts, compiled  # noqa: E402
from attnfuzz.kernels.tilelang.varlen import KERNEL, TileLangVarlen  # noqa: E402

needs_compiler = pytest.mark.skipif(KERNEL.unavailable("cpu") is not None, reason=str(KERNEL.unavailable("cpu")))
CONFIG = Config(tile_m=32, tile_n=32, threads=64, stages=1)
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-21}
RAGGED = Problem(
    seqlens_q=(37, 0, 70, 5, 33, 9),
    seqlens_k=(50, 13, 0, 66, 32, 3),
    heads=6,
    kv_heads=2,
    dim_qk=64,
    dim_v=48,
    slack_q=3,
    slack_k=5,
)


# kernels of this module's own, for the rewrite


def round_and_scale(*, dtype: str, factor: float) -> object:
    """PrimFunc (a, b, c): b = a rounded to `dtype`, by way of an on-chip tile; c = a * factor in float32."""
    n = T.dynamic("n")

    @T.prim_func
    def main(a: T.Tensor((n,), "float32"), b: T.Tensor((n,), dtype), c: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 256), threads=128) as block:
            wide = T.alloc_fragment((256,), "float32")
            narrow = T.alloc_fragment((256,), dtype)
            T.copy(a[block * 256 : (block + 1) * 256], wide)
            T.copy(wide, narrow)
            for i in T.Parallel(256):
                b[block * 256 + i] = narrow[i]
            for i in T.Parallel(256):
                c[block * 256 + i] = a[block * 256 + i] * factor

    return main


def foreign_operation() -> object:
    """PrimFunc with a warp shuffle, which has no meaning for one thread."""

    @T.prim_func
    def main(a: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                a[i] = T.shfl_xor(a[i], 1)

    return main


def awkward_floats(dtype: torch.dtype) -> torch.Tensor:
    """All sorts of float32: any bits, exact ties of `dtype`, its subnormals, its overflow, inf and NaN."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=generator).to(torch.int32).view(torch.float32)
    low = torch.randn(4096, generator=generator).to(dtype)
    ties = (low.float() + torch.nextafter(low, torch.tensor(math.inf, dtype=dtype)).float()) / 2
    halves = torch.randint(-3000, 3000, (4096,), generator=generator) + 0.5
    edge = torch.tensor([65504.0, 65519.0, 65520.0, 3.3895e38, 3.3962e38, 3.4e38, math.inf, -math.inf, math.nan, 0.0, -0.0])
    return torch.cat([bits, low.float(), ties, halves * 2.0**-24, halves * 2.0**-133, edge])


@needs_compiler
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_rewrite_rounds_as_torch_does(name: str) -> None:
    dtype, factor = getattr(torch, name), 1.00000012
    a = awkward_floats(torch.float16 if name == "float32" else dtype)
    b, c = torch.zeros_like(a, dtype=dtype), torch.zeros_like(a)

    compiled(sys.modules[__name__], "round_and_scale", {"dtype": name, "factor": factor}, "cpu")(a, b, c)

    assert torch.equal(a.to(dtype).float().nan_to_num(nan=7.0), b.float().nan_to_num(nan=7.0))
    assert torch.equal((a * torch.tensor(factor)).nan_to_num(nan=7.0), c.nan_to_num(nan=7.0))


def test_rewrite_refuses_an_unknown_operation() -> None:
    with pytest.raises(BuildError, match=r"tl\.shfl_xor_sync: this operation has no counterpart on the C target"):
        compiled(sys.modules[__name__], "foreign_operation", {}, "cpu")


def tensor_memory(*, product: str) -> object:
    """PrimFunc (a, b, c): c = a b by tcgen05, the result in tensor memory; `product` is how it is asked for."""

    @T.prim_func
    def main(a: T.Tensor((128, 64), "float16"), b: T.Tensor((64, 64), "float16"), c: T.Tensor((128, 64), "float32")):
        with T.Kernel(1, threads=128):
            left = T.alloc_shared((128, 64), "float16")
            right = T.alloc_shared((64, 64), "float16")
            result = T.alloc_tmem((128, 64), "float32")
            done = T.alloc_barrier(1)
            T.copy(a, left)
            T.copy(b, right)
            if product == "plain":
                T.tcgen05_gemm(left, right, result, mbar=done, clear_accum=True)
            elif product == "two blocks":
                T.tcgen05_gemm(left, right[:, 0:32], result, mbar=done, clear_accum=True, use_2cta=True)
            elif product == "copied":
                T.evaluate(T.call_intrin("void", ir.Op.get("tl.ptx_tcgen05_cp_warpx4"), 0, 0))
            T.mbarrier_wait_parity(done, 0)
            T.tcgen05_after_thread_sync()
            T.copy(result, c)
            T.deallocate_tmem(result)

    return main


def cluster_barrier() -> object:
    """PrimFunc with a barrier that several blocks share."""

    @T.prim_func
    def main(a: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            T.alloc_cluster_barrier(1)
            for i in T.Parallel(32):
                a[i] = 0.0

    return main


@needs_compiler
def test_a_product_in_tensor_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 8, shape, generator=generator).half() for shape in ((128, 64), (64, 64)))
    c = torch.empty(128, 64)
    compiled(sys.modules[__name__], "tensor_memory", {"product": "plain"}, "cpu")(a, b, c)
    assert torch.equal(c, a.float() @ b.float())


@pytest.mark.parametrize(
    ("product", "text"),
    [
        ("two blocks", r"tl\.tileop\.tcgen05_gemm: its annotation 'use_2cta' has no counterpart on the C target"),
        ("copied", r"tl\.ptx_tcgen05_cp_warpx4: this operation has no counterpart on the C target"),
    ],
)
def test_what_one_thread_cannot_do_with_tensor_memory_is_refused(product: str, text: str) -> None:
    with pytest.raises(BuildError, match=text):
        compiled(sys.modules[__name__], "tensor_memory", {"product": product}, "cpu")


def test_a_memory_of_several_blocks_is_refused() -> None:
    with pytest.raises(BuildError, match=r"memory 'shared\.cluster_barrier' has no counterpart on the C target"):
        compiled(sys.modules[__name__], "cluster_barrier", {}, "cpu")


def test_no_operation_is_both_dropped_and_kept() -> None:
    from attnfuzz.kernels.tilelang import cpu

    assert not cpu.NO_OPS & (cpu.KEPT | cpu.TILE_OPS | cpu.RENAMED.keys())


# attention


@dataclass
class Result:
    """Five outputs, slack rows cut off."""

    o: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def inputs_of(problem: Problem, *, seed: int = 0, amplitude: float = 1.0) -> Inputs:
    """Normal values; slack rows are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(total: int, slack: int, heads: int, dim: int) -> torch.Tensor:
        values = torch.randn(total + slack, heads, dim, generator=generator) * amplitude
        values[total:] = math.nan
        return values.to(getattr(torch, problem.dtype))

    def starts(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)

    return Inputs(
        problem=problem,
        q=tensor(problem.total_q, problem.slack_q, problem.heads, problem.dim_qk),
        k=tensor(problem.total_k, problem.slack_k, problem.kv_heads, problem.dim_qk),
        v=tensor(problem.total_k, problem.slack_k, problem.kv_heads, problem.dim_v),
        d_o=tensor(problem.total_q, problem.slack_q, problem.heads, problem.dim_v),
        cu_seqlens_q=starts(problem.seqlens_q),
        cu_seqlens_k=starts(problem.seqlens_k),
        max_seqlen_q=max(problem.seqlens_q),
        max_seqlen_k=max(problem.seqlens_k),
    )


def attention(inputs: Inputs) -> Result:
    """The same problem in float64, one sequence and head at a time; formulas as in `Problem`."""
    problem = inputs.problem
    q, k, v, d_o = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.d_o))
    want = Result(
        o=torch.zeros_like(d_o[: problem.total_q]),
        lse=torch.full((problem.heads, problem.total_q), -math.inf, dtype=torch.float64),
        dq=torch.zeros_like(q[: problem.total_q]),
        dk=torch.zeros_like(k[: problem.total_k]),
        dv=torch.zeros_like(v[: problem.total_k]),
    )
    for b in range(problem.batch):
        rows = slice(int(inputs.cu_seqlens_q[b]), int(inputs.cu_seqlens_q[b + 1]))
        keys = slice(int(inputs.cu_seqlens_k[b]), int(inputs.cu_seqlens_k[b + 1]))
        n_q, n_k = problem.seqlens_q[b], problem.seqlens_k[b]
        last = torch.arange(n_q)[:, None] + n_k - n_q if problem.causal else n_k
        hidden = torch.arange(n_k)[None, :] > last
        for h in range(problem.heads):
            g = h // problem.groups
            s = (problem.scale * q[rows, h] @ k[keys, g].T).masked_fill(hidden, -math.inf)
            lse = s.logsumexp(1)
            p = (s - lse.masked_fill(lse.isinf(), 0.0)[:, None]).exp()
            o = p @ v[keys, g]
            ds = p * (d_o[rows, h] @ v[keys, g].T - (o * d_o[rows, h]).sum(1, keepdim=True))
            want.o[rows, h], want.lse[h, rows], want.dq[rows, h] = o, lse, problem.scale * ds @ k[keys, g]
            want.dk[keys, g] += problem.scale * ds.T @ q[rows, h]
            want.dv[keys, g] += p.T @ d_o[rows, h]
    return want


@pytest.fixture(autouse=True)
def _poison():
    """`torch.empty` gives NaN, so that what a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def run(inputs: Inputs, kernel: TileLangVarlen = KERNEL) -> Result:
    problem = inputs.problem
    built = kernel.build(problem, CONFIG, "cpu")
    o, lse = built.forward(inputs)
    dq, dk, dv = built.backward(inputs, o, lse)
    assert (o.dtype, dq.dtype, dk.dtype, dv.dtype) == (inputs.q.dtype,) * 4
    assert lse is not None
    return Result(
        o=o[: problem.total_q],
        lse=lse[:, : problem.total_q],
        dq=dq[: problem.total_q],
        dk=dk[: problem.total_k],
        dv=dv[: problem.total_k],
    )


def agrees(want: Result, got: Result, dtype: str) -> dict[str, float]:
    """Error of each output over 8 roundings of its largest value (LSE: over 1e-5): right when at most 1."""
    limits = {name: 8 * UNIT[dtype] * max(getattr(want, name).abs().max().item(), 1e-3) for name in ("o", "dq", "dk", "dv")}
    limits["lse"] = 1e-5
    ratios = {}
    for name, limit in limits.items():
        expected, actual = getattr(want, name), getattr(got, name).double()
        finite = expected.isfinite()
        assert torch.equal(expected[~finite], actual[~finite]), name
        ratios[name] = (expected - actual)[finite].abs().nan_to_num(nan=math.inf).max().item() / limit
    return ratios


@needs_compiler
@pytest.mark.parametrize(
    ("causal", "dtype", "scale"),
    [
        (None, "float16", None),
        (None, "float16", -0.3),
        (None, "float16", 0.0),
        pytest.param("bottom_right", "float16", None, marks=pytest.mark.slow),
        pytest.param("bottom_right", "float16", -0.3, marks=pytest.mark.slow),
        pytest.param("bottom_right", "bfloat16", None, marks=pytest.mark.slow),
        pytest.param(None, "float32", None, marks=pytest.mark.slow),
    ],
)
def test_matches_float64(causal, dtype: str, scale: float | None) -> None:
    inputs = inputs_of(_with(causal=causal, dtype=dtype, softmax_scale=scale))
    want, got = attention(inputs), run(inputs)

    assert {name: ratio for name, ratio in agrees(want, got, dtype).items() if not ratio <= 1} == {}
    dead = want.lse.isinf()
    assert dead.sum() >= 70 * 6
    assert not got.o.transpose(0, 1)[dead].any()
    assert not got.dq.transpose(0, 1)[dead].any()
    assert (got.lse[dead] == -math.inf).all()
    assert not got.dk[50:63].any()
    assert not got.dv[50:63].any()


@needs_compiler
def test_scores_below_any_finite_sentinel() -> None:
    inputs = inputs_of(_with(causal=None, dtype="float32", softmax_scale=-1e32))
    inputs.q.abs_()
    inputs.k.abs_()
    want, got = attention(inputs), run(inputs)

    alive = want.lse.isfinite()
    assert want.lse[alive].max() < -1e30
    assert torch.allclose(want.lse[alive], got.lse[alive].double(), rtol=1e-5)
    assert got.o.isfinite().all()


@needs_compiler
def test_many_shapes_share_one_compile() -> None:
    _ = run(inputs_of(RAGGED))
    before = compile_counts()
    for lengths_q, lengths_k, heads, kv_heads in [
        ((1,), (1,), 1, 1),
        ((33, 31), (64, 1), 4, 4),
        ((0, 7, 100), (9, 0, 40), 5, 1),
    ]:
        problem = Problem(seqlens_q=lengths_q, seqlens_k=lengths_k, heads=heads, kv_heads=kv_heads, dim_qk=64, dim_v=48)
        inputs = inputs_of(problem)
        assert max(agrees(attention(inputs), run(inputs), "float16").values()) <= 1
        assert KERNEL.compile_key(problem, CONFIG) == KERNEL.compile_key(RAGGED, CONFIG)
    assert compile_counts() == before


@needs_compiler
@pytest.mark.parametrize(("lengths_q", "lengths_k"), [((0, 0), (0, 0)), ((0,), (5,)), ((5, 0), (0, 0))])
@pytest.mark.parametrize("slack", [0, 2])
def test_empty_sequences_only(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], slack: int) -> None:
    problem = _with(seqlens_q=lengths_q, seqlens_k=lengths_k, slack_q=slack, slack_k=slack, causal=None)
    got = run(inputs_of(problem))

    assert not any(x.any() for x in (got.o, got.dq, got.dk, got.dv))
    assert (got.lse == -math.inf).all()
    assert got.lse.shape == (6, sum(lengths_q))


@needs_compiler
@pytest.mark.slow
def test_an_edited_copy_is_a_kernel_of_its_own(tmp_path: Path) -> None:
    right, wrong = "offset = n_k - n_q", "offset = 0"
    source = Path(varlen_device.__file__).read_text()
    assert source.count(right) == 2
    copy = tmp_path / "varlen_device_without_offset.py"
    copy.write_text(source.replace(right, wrong, 1))
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    faulty = TileLangVarlen(name="demo.without_offset", device_code=lambda: module)
    inputs = inputs_of(_with(causal="bottom_right"))
    want, right_result, wrong_result = attention(inputs), run(inputs), run(inputs, faulty)

    assert isinstance(faulty, Kernel)
    assert str(copy) in faulty.files
    assert max(agrees(want, right_result, "float16").values()) <= 1
    assert (want.lse - wrong_result.lse).nan_to_num(nan=0.0).abs().max() > 0.1


# what the adapter says of itself


def test_declares_what_it_can() -> None:
    assert isinstance(KERNEL, Kernel)
    assert KERNEL.configs(RAGGED)
    for dims in KERNEL.capabilities.dims:
        for dtype in KERNEL.capabilities.dtypes:
            problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=dims[0], dim_v=dims[1], dtype=dtype)
            configs = KERNEL.configs(problem)
            assert configs
            assert [KERNEL.supports(problem, config, "cpu") for config in configs] == [None] * len(configs)
    assert all(Path(path).is_file() for path in KERNEL.files)


def test_refuses_a_config_of_others() -> None:
    reason = KERNEL.supports(RAGGED, Config(tile_m=16, tile_n=16, threads=32, stages=1), "cpu")
    assert reason is not None
    assert reason.startswith("config=stages=1 threads=32 tile_m=16 tile_n=16: supports ")


def test_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert "g++" in str(KERNEL.unavailable("cpu"))


@needs_compiler
def test_compiler_errors_are_build_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CPU_FLAGS", ("-O2", "--no-such-flag"))
    with pytest.raises(BuildError, match="--no-such-flag"):
        compiled(sys.modules[__name__], "round_and_scale", {"dtype": "float16", "factor": 2.0}, "cpu")


def _with(**changes) -> Problem:
    return msgspec.structs.replace(RAGGED, **changes)
