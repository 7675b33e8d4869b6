"""Cases and verdicts in words."""

from __future__ import annotations

import msgspec

from attnfuzz.harness.core.text import counted, one_line, printable
from attnfuzz.harness.judge.failure import OUTPUT_TITLES
from attnfuzz.harness.judge.verdict import IN_DOUBT, Figures, Verdict
from attnfuzz.kernels.expressions.tree import parse
from attnfuzz.kernels.modified import shape_of, tensors_of
from attnfuzz.kernels.problem import LAYOUTS, SINKS, Layout, Needs
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.neighbours import differences, value_of

__all__ = ["describe_case", "describe_verdict", "lengths", "needs_earlier"]

_MOST_EARLIER = 8
"""Earlier Cases that are described."""


def lengths(case: Case) -> str:
    """Return seqlen_q x seqlen_k of each sequence, such as "3x7 + 0x5"."""
    p = case.problem
    return " + ".join(f"{n_q}x{n_k}" for n_q, n_k in zip(p.seqlens_q, p.seqlens_k, strict=True))


def describe_case(case: Case) -> list[tuple[str, str]]:
    """Return (name, value) rows: what differs from the plainest Case, the most important first. Each is one printable line."""
    p = case.problem
    rows = [("kernel", case.kernel), ("seqlen_q x seqlen_k", f"{lengths(case)} ({p.packing})")]
    rows.append(("heads", f"{p.heads} query, {p.kv_heads} key/value (groups of {p.groups})"))
    rows.append(("dims", f"dim_qk {p.dim_qk}, dim_v {p.dim_v}"))
    rows.append(("dtype", p.dtype))
    rows.append(("causal", p.causal or "no"))
    if p.softmax_scale is not None:
        rows.append(("softmax_scale", f"{p.softmax_scale:g}"))
    if p.window is not None:
        rows.append(("window", str(p.window)))
    if p.softcap:
        rows.append(("softcap", f"{p.softcap:g}"))
    for name in ("score_mod", "mask_mod"):
        if getattr(p, name) is not None:
            rows.append((name, str(parse(getattr(p, name)))))
    if p.page_size:
        rows.append(("paged cache", f"pages of {p.page_size}"))
    if p.sinks:
        rows.append(("sinks", f"{p.heads}, {case.recipe.sinks}"))
    for each in (each for each in tensors_of(p) if not (p.sinks and each.name == SINKS)):
        of = ", its gradient wanted" if each.gradient else ""
        rows.append((f"captured {each.name}", f"{' x '.join(map(str, shape_of(p, each)))} {each.fill}{of}"))
    for name, title in zip(LAYOUTS, ("q", "k", "v", "dO"), strict=True):
        if (layout := getattr(p, name)) != Layout():
            rows.append((f"layout of {title}", _layout(layout)))
    if p.needs != Needs():
        rows.append(("needs", ", ".join([*p.needs.outputs, *(["dLSE given"] if p.needs.dlse else [])])))
    if p.slack_q or p.slack_k:
        rows.append(("slack rows", f"{p.slack_q} query, {p.slack_k} key"))
    plain, recipe = Recipe(), case.recipe
    scales = [
        f"{name}={getattr(recipe, name):g}"
        for name in ("q_scale", "k_scale", "v_scale", "do_scale")
        if getattr(recipe, name) != getattr(plain, name)
    ]
    rows.append(("values", " ".join([recipe.pattern, *scales, f"seed={recipe.seed}"])))
    if case.check != "oracle":
        rows.append(("check", case.check))
    if case.schedule:
        rows.append(("schedule", ", ".join(map(str, case.schedule))))
    if case.config:
        rows.append(("config", str(case.config)))
    return [(name, one_line(value)) for name, value in [*rows, *_earlier_rows(case)]]


def needs_earlier(case: Case) -> str:
    """Return that a Case fails only after those that run first."""
    return f"passes alone; fails after {_these(len(case.after))} in the same process"


def _these(count: int) -> str:
    return "this Case" if count == 1 else f"these {count} Cases"


def _earlier_rows(case: Case) -> list[tuple[str, str]]:
    """Return rows for the Cases that run first, each by what it has other than the Case itself."""
    if not case.after:
        return []
    rows = [("earlier Cases", needs_earlier(case))]
    for number, each in enumerate(case.after[:_MOST_EARLIER], 1):
        parts = [f"{part}: {value_of(each, part)}" for part in differences(case, each)]
        rows.append((f"   {number} of {len(case.after)}", "; ".join(parts) or "the same Case"))
    if (more := len(case.after) - _MOST_EARLIER) > 0:
        rows.append(("   ...", f"{counted(more, 'Case')} more, in the case file"))
    return rows


def _layout(layout: Layout) -> str:
    words = {
        "order": f"stored as {layout.order}",
        "offset": f"{counted(layout.offset, 'element')} into its allocation",
        "pitch": f"{counted(layout.pitch, 'element')} of padding after each row",
        "expanded_heads": "one head shown as all (stride 0)",
        "packed": "packed with the others",
        "expanded": "one element shown everywhere (stride 0)",
    }
    return ", ".join(words[name] for name in msgspec.to_builtins(layout))


def describe_verdict(verdict: Verdict) -> list[str]:
    """Return the lines of each failure's message, or the worst error over budget of each output."""
    if verdict.failures:
        return [line for each in verdict.failures for line in printable(f"{each.kind}: {each.message}").split("\n")]
    lines = [f"{OUTPUT_TITLES[name]}: {_figures(each)}" for name, each in verdict.figures.items()]
    return lines + [f"d {printable(tensor)}: {_figures(each)}" for tensor, each in verdict.captured.items()]


def _figures(figures: Figures) -> str:
    if figures.unjudged:
        return f"not judged ({figures.unjudged})"
    rest = f"; {figures.doubted} more not judged ({IN_DOUBT})" if figures.doubted else ""
    return f"worst error {figures.worst:.3g} of its budget over {counted(figures.elements, 'element')}{rest}"
