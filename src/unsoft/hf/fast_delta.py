"""The delta rule functions of accelerated models: those of transformers' models, by our kernels.

transformers has one function for many tokens and one for a single token, each under a global name of the
model's file; :data:`REPLACEMENTS` lists them. Replacements take the same arguments. Packed texts, for which
transformers requires flash-linear-attention, restart the state at every boundary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.engines.linear.delta import DELTA, LOWEST, DeltaCall
from unsoft.engines.native.availability import library_failure
from unsoft.hf.architecture import forward_code
from unsoft.modules.delta import unit

_CLOSE = 1e-5


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    own: Callable[..., tuple[Tensor, Tensor | None]],
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output (batch, tokens, heads, width) and the final state or None, as ``own`` does.

    query, key (batch, tokens, heads, D), value (batch, tokens, value heads, Dv), beta and g (batch, tokens,
    value heads), g with D numbers per head where every channel decays by itself. ``own`` runs on devices
    other than the CPU, in traced code, and for decays below exp(-5) per channel, which would overflow.
    """
    boundaries = packed_boundaries(options, query.shape[1])
    options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
    if boundaries is not None and len(boundaries) > 2:
        if initial_state is not None or len(query) > 1:
            raise ValueError(
                "accelerate: packed texts must be one row without an initial state; here are"
                f" {len(query)} rows{'' if initial_state is None else ' and a state'}"
            )
        alone: Any = partial(delta_rule, own=own, output_final_state=True, **options)
        parts = [
            alone(*(x[:, start:end] for x in (query, key, value, g, beta)))
            for start, end in pairwise(boundaries)
        ]
        outs, states = zip(*parts, strict=True)
        return torch.cat(outs, dim=1), torch.cat(states) if output_final_state else None
    if not _supported(query, g):
        options |= {"initial_state": initial_state, "output_final_state": output_final_state}
        return own(query, key, value, g=g, beta=beta, **options)
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v, b, decay = (x.transpose(1, 2).to(dtype) for x in (query, key, value, beta, g))
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    q = q * q.shape[-1] ** -0.5
    groups = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (q, k))
    decay = decay[..., None] if decay.dim() == 3 else decay
    state = None if initial_state is None else initial_state.to(dtype)
    out, after = _run(DeltaCall(q, k, v, b, decay, state))
    return out.transpose(1, 2).to(query.dtype).contiguous(), after if output_final_state else None


def _supported(query: Tensor, g: Tensor) -> bool:
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if library_failure("delta", query.dtype == torch.float64) is not None:
        return False
    return g.dim() == 3 or g.numel() == 0 or bool(g.detach().amin() >= LOWEST)


def _run(call: DeltaCall) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", enabled=False):
        return DELTA.choose("auto", call).run(call)


def packed_boundaries(options: dict[str, Any], length: int) -> list[int] | None:
    """Return the boundaries 0, ..., length of packed texts, and remove them from the keywords.

    They are ``cu_seqlens`` (``cu_seq_lens_q`` where a model passes transformers' keywords on) or ``seq_idx``.
    """
    found = [options.pop(name, None) for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx")]
    ends = next((x for x in found[:2] if x is not None), None)
    if ends is not None:
        boundaries: list[int] = ends.flatten().tolist()
        if boundaries[0] != 0 or boundaries[-1] != length:
            raise ValueError(
                f"accelerate: boundaries of packed texts must go from 0 to {length}, not from"
                f" {boundaries[0]} to {boundaries[-1]}"
            )
        return boundaries
    if found[2] is None:
        return None
    changes = found[2].reshape(-1, length)[0].diff().nonzero().flatten() + 1
    return [0, *changes.tolist(), length]


def packed_convolution(
    hidden_states: Tensor, *args: Any, own: Callable[..., Tensor], **options: Any
) -> Tensor:
    """Return the causal convolution of (batch, channels, tokens), started again for every packed text."""
    names = {"cu_seqlens", "cu_seq_lens_q", "seq_idx"}
    marks = {name: options.pop(name) for name in names & options.keys()}
    ends = next((x for name, x in marks.items() if x is not None), None)
    if ends is None:
        return own(hidden_states, *args, **options)
    tokens = marks["seq_idx"].shape[-1] if marks.get("seq_idx") is not None else int(ends.flatten()[-1])
    boundaries = packed_boundaries(marks, tokens) or [0, tokens]
    before = hidden_states.shape[2] - tokens  # columns of a cache, which belong to the first text
    places = [0, *(end + before for end in boundaries[1:])]
    parts = [own(hidden_states[:, :, a:b], *args, **options) for a, b in pairwise(places)]
    return torch.cat(parts, dim=2)


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "torch_recurrent_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "recurrent_kimi_delta_attention": delta_rule,
    "causal_conv1d_fn": packed_convolution,
}
"""Functions that replace those of the same global name in the files of delta rule models."""


def delta_functions(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return replacements for the delta rule functions that a module's forward calls, by global name."""
    names = forward_code(kind).co_names
    owner = getattr(inspect.unwrap(kind.forward), "__globals__", {})
    called = {name: owner[name] for name in REPLACEMENTS if name in names and name in owner}
    if not any(REPLACEMENTS[name] is delta_rule for name in called):
        return {}
    return {name: partial(REPLACEMENTS[name], own=function) for name, function in called.items()}


def describe_delta(kind: type[nn.Module]) -> str:
    """Return the kind of delta rule in words."""
    per_channel = any("kimi" in name for name in delta_functions(kind))
    return "delta rule, a decay per channel" if per_channel else "gated delta rule"


def delta_difference(kind: type[nn.Module]) -> str | None:
    """Return how our kernel differs from a module's functions on a small call; None if they agree."""
    if (failure := library_failure("delta", False)) is not None:
        return f"cannot be compiled here ({failure})"
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    with torch.device("cpu"), torch.no_grad():
        q, k, v = draw(1, 70, 2, 8), draw(1, 70, 2, 8), draw(1, 70, 2, 4)
        b, state = draw(1, 70, 2).sigmoid(), draw(1, 2, 8, 4)
        for name, ours in delta_functions(kind).items():
            if REPLACEMENTS[name] is not delta_rule:
                continue
            g = -draw(1, 70, 2, 8).abs() if "kimi" in name else -draw(1, 70, 2).abs()
            own = inspect.unwrap(ours.keywords["own"])  # type: ignore[attr-defined]
            both = []
            for function in (own, ours):
                try:
                    both.append(
                        function(
                            *(q, k, v),
                            g=g,
                            beta=b,
                            initial_state=state,
                            output_final_state=True,
                            use_qk_l2norm_in_kernel=True,
                        )
                    )
                except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                    return f"does not run on a sample ({type(error).__name__}: {error})"
            if any((x - y).abs().max() > _CLOSE for x, y in zip(*both, strict=True)):
                return f"computes something else than the gated delta rule in {name}"
    return None
