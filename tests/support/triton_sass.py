"""Prints the machine code for Hopper of triton.flex.prescaled's backward, inputs strided. Run as a script: compiled Triton."""

from __future__ import annotations


def main() -> None:
    """Tiles of 32 queries by 64 keys: those that ptxas 12.8 got wrong."""
    from attnfuzz.harness.compile.figures import disassembled
    from attnfuzz.kernels.problem import Layout, Problem
    from attnfuzz.kernels.triton.flex import PRESCALED

    lengths = {"seqlens_q": (40,), "seqlens_k": (50,), "packing": "dense"}
    problem = Problem(**lengths, dim_qk=64, dim_v=48, dtype="bfloat16", layout_do=Layout(pitch=1))
    config = next(each for each in PRESCALED.configs(problem) if each.integer("dkv_tile_m") == 32 and each.integer("block") == 64)
    (backward,) = (each for each in PRESCALED.lower(problem, config, "sm_90a") if each.function == "backward")
    print(disassembled(backward.compile().cubin))


if __name__ == "__main__":
    main()
