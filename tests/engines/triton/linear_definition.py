"""Definition of linear attention with every weight written out, the reference for the kernels."""

import torch


def written_out(q, k, v, decay, state, *, causal, normalise):
    """Return the output and the state after the last key, for q (B, H, L, F), k (B, Hk, S, F), v (B, Hk, S,
    Dv)."""
    group = q.shape[1] // k.shape[1]
    state_group = 1 if decay is not None else group
    all_k, all_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    ones = torch.ones_like(all_v[..., :1])
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    weights = torch.einsum("bhif,bhjf->bhij", q, all_k)
    fade = torch.ones(q.shape[1], dtype=q.dtype) if decay is None else decay
    if causal:
        weights = weights * torch.where(j <= i, fade[:, None, None] ** (i - j).clamp(min=0), 0.0)
    sums = torch.einsum("bhij,bhjd->bhid", weights, torch.cat([all_v, ones], dim=-1))
    if state is not None:
        every = state.repeat_interleave(state_group, dim=1)
        read = torch.einsum("bhif,bhfd->bhid", q, every)
        sums = sums + read * (fade[:, None] ** (i[:, 0] + 1))[None, :, :, None]
    out = sums[..., :-1] / sums[..., -1:] if normalise else sums[..., :-1]
    some_k, some_v = (all_k, all_v) if decay is not None else (k, v)
    last = k.shape[2] - 1 - torch.arange(k.shape[2])
    aged = some_k if decay is None else some_k * (fade[:, None] ** last)[None, :, :, None]
    after = torch.einsum("bhjf,bhjd->bhfd", aged, torch.cat([some_v, torch.ones_like(some_v[..., :1])], -1))
    if state is not None:
        after = after + state * (1.0 if decay is None else (fade ** k.shape[2])[None, :, None, None])
    return out, after


def logarithms_written_out(q, k, v, decay, state, *, causal, normalise, logarithmic):
    """Return the same for features given as logarithms. The last column of a state holds the largest value of
    every feature, by which its sums were divided; these are not differentiated."""
    assert normalise and logarithmic and decay is None
    group, seen = q.shape[1] // k.shape[1], torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    all_k, all_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    terms = q[:, :, :, None] + all_k[:, :, None]
    seen = seen.tril()[..., None] if causal else seen[..., None]
    terms = torch.where(seen, terms, -torch.inf)
    top, largest = terms.detach().amax((-2, -1)), k.detach().amax(2)
    if state is not None:
        size = state[..., -1].detach()
        largest = torch.maximum(largest, size)
        before = q + size.repeat_interleave(group, dim=1)[:, :, None]
        top = torch.maximum(top, before.detach().amax(-1))
    weights = (terms - top[..., None, None]).exp().sum(-1)
    sums = weights @ torch.cat([all_v, torch.ones_like(all_v[..., :1])], dim=-1)
    after = (k - largest[:, :, None]).exp().mT @ torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    if state is not None:
        every = state[..., :-1].repeat_interleave(group, dim=1)
        sums = sums + (before - top[..., None]).exp() @ every
        after = after + state[..., :-1] * (size - largest).exp()[..., None]
    return sums[..., :-1] / sums[..., -1:], torch.cat([after, largest[..., None]], dim=-1)


def logarithmic_example(*, size, state=False, dtype, width=8, value_width=5, kv_heads=1, **shape):
    """Return logarithms of features with a spread of about ``size``."""
    given = example(dtype=dtype, width=width, value_width=value_width, kv_heads=kv_heads, **shape)
    source = torch.Generator().manual_seed(4)
    for name in ("q", "k"):
        given[name] = (size * torch.randn(given[name].shape, generator=source)).to(dtype)
    if state:
        earlier = (size * torch.randn(2, kv_heads, 3, width, generator=source)).to(dtype)[: len(given["q"])]
        values = torch.randn(len(earlier), kv_heads, 3, value_width, generator=source).to(dtype)
        whole = {"q": earlier, "k": earlier, "v": values, "decay": None, "state": None}
        options = {"causal": True, "normalise": True, "logarithmic": True}
        given["state"] = logarithms_written_out(**whole, **options)[1]
    return given


def example(
    *,
    batch=2,
    length,
    keys=None,
    width=8,
    value_width=5,
    heads=2,
    kv_heads=1,
    decays=False,
    state=False,
    dtype,
):
    """Return positive features, so that a sum of weights is never near 0."""
    source = torch.Generator().manual_seed(length + width)
    keys = length if keys is None else keys

    def numbers(*shape):
        return torch.rand(shape, generator=source).to(dtype) + 0.1

    state_heads = heads if decays else kv_heads
    return {
        "q": numbers(batch, heads, length, width),
        "k": numbers(batch, kv_heads, keys, width),
        "v": torch.randn(batch, kv_heads, keys, value_width, generator=source).to(dtype),
        "decay": 1 - 0.3 * numbers(heads) if decays else None,
        "state": numbers(batch, state_heads, width, value_width + 1) if state else None,
    }


def errors(function, given, dtype, definition=written_out, **options):
    """Return relative errors (Euclidean norm) of output, state and every gradient of ``function`` in one
    dtype against the definition in float64."""

    def run(compute, kind):
        leaves = {name: None if x is None else x.to(kind).requires_grad_() for name, x in given.items()}
        out, after = compute(**leaves, **options)
        source = torch.Generator().manual_seed(3)
        upstream = [torch.randn(x.shape, generator=source).to(kind) for x in (out, after)]
        wanted = [x for x in leaves.values() if x is not None]
        return [out, after, *torch.autograd.grad([out, after], wanted, upstream)]

    pairs = zip(run(function, dtype), run(definition, torch.float64), strict=True)
    return [float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]
