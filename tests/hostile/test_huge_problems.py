"""Problems whose sizes no machine holds: refused in words, before memory is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile_files import apart, attnfuzz, problem, refused, written


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with apart(tmp_path, monkeypatch):
        yield


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "2^31 keys": ({"seqlens_k": [2**31]}, "does not fit cu_seqlens, which is int32"),
    "2^31 keys in all": ({"seqlens_q": [1, 1], "seqlens_k": [2**30, 2**30]}, "does not fit cu_seqlens"),
    "2^31 slack rows": ({"slack_q": 2**31}, "does not fit cu_seqlens"),
    "2^62 dims": ({"dim_qk": 2**62}, "dim_qk, dim_v="),
    "a window of 400 digits": ({"window": [10**400, 0], "causal": "nope"}, "case.problem: "),
    "a negative length": ({"seqlens_q": [-(2**62)]}, "a length cannot be negative"),
    "a softmax_scale beyond float32": ({"softmax_scale": 1e300}, "it does not fit float32"),
    "a softcap beyond float32": ({"softcap": 1e300}, "it does not fit float32"),
    "heads that do not divide": ({"heads": 2**62, "kv_heads": 3}, "it does not divide heads="),
    "100,000 sequences against one": ({"seqlens_q": [1] * 100_000}, "it has 1 lengths and seqlens_q has 100000"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_problem_is_refused(name: str) -> None:
    changed, reason = REFUSED[name]
    Path("case.json").write_bytes(written(problem(**changed)))
    for more in ((), ("--script", "script.py")):
        assert len(refused(attnfuzz("repro", "case.json", "--device", "cpu", *more), reason)) < 3000


TOO_LARGE: dict[str, dict[str, Any]] = {
    "2^31 - 1 keys": {"seqlens_k": [2**31 - 1]},
    "2^62 heads": {"heads": 2**62, "kv_heads": 2**62},
    "a pitch of 2^62": {"layout_k": {"pitch": 2**62}},
    "an offset of 2^62": {"layout_q": {"offset": 2**62}},
    "a pitch of 400 digits": {"layout_v": {"pitch": 10**400}},
    "200,000 sequences": {"seqlens_q": [1] * 200_000, "seqlens_k": [1] * 200_000},
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_huge_problem_is_shown_and_makes_no_script(name: str) -> None:
    Path("case.json").write_bytes(written(problem(**TOO_LARGE[name])))
    assert attnfuzz("show", "case.json").exit_code == 0
    refused(attnfuzz("repro", "case.json", "--device", "cpu", "--script", "script.py"))
    assert not Path("script.py").exists()
