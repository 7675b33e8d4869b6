"""The kernel as declared to attnfuzz."""

from attnfuzz.kernels import dense
from my_attention import kernels
from my_attention.attention import my_attention

KERNEL = dense(
    my_attention,
    name="my_attention",
    backend="triton",
    devices=("cpu", "cuda"),
    dims=((32, 32), (64, 64)),
    groups=None,
    unequal=True,
    deterministic=("o", "lse", "dq", "dk", "dv"),
    configs=({"tile_m": 32, "tile_n": 32}, {"tile_m": 16, "tile_n": 32}),
    files=(kernels.__file__,),
)
