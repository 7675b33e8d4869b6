"""The float64 reference of one Case, written out: plain attention over the whole batch, with the masks and modifiers it has."""

from __future__ import annotations

from attnfuzz.harness.repro.script.trees import function_of
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.expressions.tree import captured, parse
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

__all__ = ["reference_of"]


def reference_of(case: Case, kernel: Kernel) -> str:
    """The source of `reference(inputs)`, which gives outputs by name, float64, heads first; and of the modifiers' functions."""
    p = case.problem
    base = " / 0.6931471805599453  # log 2" if kernel.capabilities.deviations.lse_base2 else ""
    parts = [function_of(name, parse(getattr(p, name))) for name in ("score_mod", "mask_mod") if getattr(p, name) is not None]
    lines = [
        "def reference(inputs):",
        '    """float64 O, LSE, dQ, dK, dV of the batch, heads first (heads, tokens[, dim])."""',
        "    p, groups = inputs.problem, inputs.problem.groups",
        "    q, k, v = (x.detach().cpu().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))",
        "    d_o = inputs.d_o.detach().cpu().double()",
        *_captured(p),
        "    begin_q, begin_k = cumulated(p.seqlens_q), cumulated(p.seqlens_k)",
        "    outputs, lses, loss = [], [], torch.zeros((), dtype=torch.float64)",
        "    for b, (n_q, n_k) in enumerate(zip(p.seqlens_q, p.seqlens_k)):",
        *_slices(p),
        "        kb, vb = kb.repeat_interleave(groups, 0), vb.repeat_interleave(groups, 0)",
        "        s = p.scale * (qb @ kb.transpose(-1, -2))",
        *(["        s = torch.tanh(s / p.softcap) * p.softcap"] if p.softcap else []),
        *_masks(p),
        "        blind = ~visible.any(-1)  # rows that see no key: O is 0, LSE is -inf, no gradient",
        "        s = s.masked_fill(~(visible | blind[..., None]), -torch.inf)",
        "        o = (torch.softmax(s, -1) @ vb if n_k else s @ vb).masked_fill(blind[..., None], 0.0)",
        "        lse = (torch.logsumexp(s, -1) if n_k else s.sum(-1)).masked_fill(blind, 0.0)",
        "        loss = loss + (o * gb).sum()" + (" + (lse * lb).sum()" if p.needs.dlse else ""),
        "        outputs.append(o)",
        "        lses.append(lse.masked_fill(blind, -torch.inf))",
        f"    names, leaves = {_names(p)}, {_leaves(p)}",
        "    found = dict(zip(names, torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)))",
        '    for name in ("dq", "dk", "dv"):',
        "        found[name] = heads_first(p, name, found[name])",
        '    found["o"] = torch.cat(outputs, 1).detach()',
        f'    found["lse"] = torch.cat(lses, 1).detach(){base}',
        "    return found",
    ]
    return "\n\n\n".join([*parts, "\n".join(lines)])


def _taking(p: Problem) -> list[str]:
    return [each.name for each in tensors_of(p) if each.gradient]


def _names(p: Problem) -> str:
    return "[" + ", ".join(f'"{name}"' for name in ("dq", "dk", "dv", *(f"d {name}" for name in _taking(p)))) + "]"


def _leaves(p: Problem) -> str:
    return "[" + ", ".join(["q", "k", "v", *(f'tensors["{name}"]' for name in _taking(p))]) + "]"


def _captured(p: Problem) -> list[str]:
    """The tensors that the modifiers read, by name: float64, or int64 where they hold whole numbers."""
    lines = []
    for number, each in enumerate(tensors_of(p)):
        form = ".long()" if each.kind == "int" else ".double()" + (".requires_grad_()" if each.gradient else "")
        lines.append(f'    tensors["{each.name}"] = inputs.captured[{number}].detach().cpu(){form}')
    return ["    tensors = {}", *lines] if lines else []


def _slices(p: Problem) -> list[str]:
    """One sequence's q, k, v, dO, dLSE, heads first."""
    dense = p.packing == "dense"
    rows = "b, :n_q" if dense else "begin_q[b] : begin_q[b + 1]"
    keys = "b, :n_k" if dense else "begin_k[b] : begin_k[b + 1]"
    lines = [
        f"        qb, gb = (x[{rows}].transpose(0, 1) for x in (q, d_o))",
        f"        kb, vb = (x[{keys}].transpose(0, 1) for x in (k, v))",
    ]
    if p.needs.dlse:
        at = "b, :, :n_q" if dense else ":, begin_q[b] : begin_q[b + 1]"
        lines.append(f"        lb = inputs.d_lse[{at}].cpu().double()")
    return lines


def _masks(p: Problem) -> list[str]:
    lines = [
        "        i, j = torch.arange(n_q)[:, None], torch.arange(n_k)[None, :]",
        "        visible = torch.ones(n_q, n_k, dtype=torch.bool)",
    ]
    diagonal = "i" if p.causal == "top_left" else "i + n_k - n_q"
    if p.causal is not None:
        lines.append(f"        visible = visible & (j <= {diagonal})  # causal, {p.causal.replace('_', '-')} aligned")
    left, right = p.window or (None, None)
    if left is not None:
        lines.append(f"        visible = visible & (j >= {diagonal} - {left})  # window")
    if right is not None:
        lines.append(f"        visible = visible & (j <= {diagonal} + {right})  # window")
    if p.score_mod is not None or p.mask_mod is not None:
        lines.append("        if n_q and n_k:  # heads, queries and keys that broadcast")
        lines.append("            h, lengths = torch.arange(p.heads)[:, None, None], [torch.tensor(n_q), torch.tensor(n_k)]")
        lines.append("            at = [torch.tensor(b), h, i, j, *lengths]")
    for name in ("score_mod", "mask_mod"):
        if (data := getattr(p, name)) is None:
            continue
        tensors = "".join(f', tensors["{each.name}"]' for each in captured(parse(data)))
        if name == "score_mod":
            lines.append(f"            s = score_mod(s, *at{tensors}).expand(s.shape)")
        else:
            lines.append(f"            visible = visible & mask_mod(*at{tensors})")
    return lines
