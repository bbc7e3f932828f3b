"""Every family written down from its paper, in plain torch and float64, with all weights: what the tests compare results with.

Nothing here uses the package's own arithmetic; a module only lends its parameters.
"""

import math

import torch

import unsoft


def attend(name, module, q, k, v, *, visible=None, bias=None, offset=None, scale=None):
    """Output (B, H, L, Dv) in float64. ``visible``, ``bias`` broadcast to (B, query heads, L, S); ``offset``: row i stands at
    the position of key i + offset and sees keys up to it, or all keys if that is None."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    seen = torch.ones(len(q), q.shape[1], q.shape[2], k.shape[2], dtype=torch.bool)
    if visible is not None:
        seen = seen & visible
    rows = torch.arange(q.shape[2])[:, None] + (offset or 0)
    keys = torch.arange(k.shape[2])
    if offset is not None:
        seen = seen & (keys <= rows)
    bias = torch.zeros(()).double() if bias is None else torch.where(seen, bias.double(), 0.0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    family = next(f for f in _FAMILIES if name == f or name.startswith(f + "("))
    return _FAMILIES[family](_Call(module, q, k, v, seen, bias, rows, keys, scale))


class _Call:
    def __init__(self, module, q, k, v, seen, bias, rows, keys, scale):
        self.module, self.q, self.v, self.seen, self.bias = module, q, v, seen, bias
        self.rows, self.keys, self.scale = rows, keys, scale
        group = q.shape[1] // max(k.shape[1], 1)
        self.k, self.v = (x.repeat_interleave(group, dim=1) for x in (k, v))

    def shares(self, log_weights):
        """Weights proportional to exp(log_weights + bias) over the keys that are seen."""
        logs = torch.where(self.seen, log_weights + self.bias, -math.inf)
        if logs.shape[-1] == 0:
            return logs
        top = logs.amax(-1, keepdim=True)
        e = (logs - torch.where(top == -math.inf, 0.0, top)).exp()
        total = e.sum(-1, keepdim=True)
        return torch.where(total == 0, 0.0, e / torch.where(total == 0, 1.0, total))

    def logits(self, q=None):
        return self.scale * ((self.q if q is None else q) @ self.k.mT)


def _products(feature):
    def weights(c):
        return c.shares((feature(c.q) @ feature(c.k).mT).log()) @ c.v

    return weights


def _log_sums(feature):
    """Features that are exponentials: log sum_f exp(f(q) + f(k)), pair by pair."""

    def weights(c):
        root = math.sqrt(abs(c.scale))
        fq, fk = feature(c, c.q * math.copysign(root, c.scale)), feature(c, c.k * root)
        rows = [torch.logsumexp(fq[:, :, i, None] + fk, -1) for i in range(c.q.shape[2])]
        logs = torch.stack(rows, 2) if rows else c.logits()
        return c.shares(logs) @ c.v

    return weights


def _random_features(c, x):
    return x @ c.module.directions.double().mT - x.square().sum(-1, keepdim=True) / 2


def _cosine(c):
    limit = c.module.position_limit

    def fold(p):
        return limit - ((p % (2 * limit)) - limit).abs()

    turn = (math.pi / 2 * (fold(c.rows) - fold(c.keys)).double() / limit).cos()
    products = c.q.relu() @ c.k.relu().mT * turn.clamp(min=0)
    return c.shares(products.log()) @ c.v


def _identity(c):
    n = c.seen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(c.seen, c.logits() * c.bias.exp() / n, 0.0) @ c.v


def _faded(content):
    def out(c):
        d = c.module.logit.detach().double().sigmoid()[:, None, None]
        fading = d ** (c.rows - c.keys).clamp(min=0)
        weights = (c.logits() if content else 1.0) * fading * c.bias.exp()
        return torch.where(c.seen, weights, 0.0) @ c.v

    return out


def _gpam(c):
    m = c.module
    plus, minus = (x.detach().double()[:, None, None] for x in m.strengths())
    second = c.q.relu() @ m.negative_map.detach().double()
    return (1 + plus) * c.shares(c.logits()) @ c.v - minus * c.shares(c.logits(second)) @ c.v


def _differential(c):
    """Pair p has the query and key heads 2p and 2p + 1, and the values of both side by side."""
    m = c.module
    group = c.q.shape[1] // c.original_heads if hasattr(c, "original_heads") else 1
    assert group == 1, "written for as many key heads as query heads"
    maps = c.shares(c.logits())
    a1, b1, a2, b2 = m.vectors.detach().double()
    first = 0.8 - 0.6 * math.exp(-0.3 * m.place.layer)
    strength = (a1 @ b1).exp() - (a2 @ b2).exp() + first
    outs = []
    for p in range(0, c.q.shape[1], 2):
        joined = torch.cat([c.v[:, p], c.v[:, p + 1]], -1)
        y = (maps[:, p] - strength * maps[:, p + 1]) @ joined
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m.gain.detach().double() * (1 - first)
        outs += list(y.chunk(2, -1))
    return torch.stack(outs, 1)


def _differential2(c):
    m = c.module
    maps = c.shares(c.logits()) @ c.v
    own = c.q[:, 0::2]
    strength = (
        own @ m.factor.weight.detach().double() + m.factor.constant.detach().double()[:, None]
    ).sigmoid()
    return maps[:, 0::2] - strength * maps[:, 1::2]


def _logn_gpam(c):
    n = c.seen.sum(-1, keepdim=True).clamp(min=1).double()
    c.scale = c.scale * n.log() / math.log(512)
    return _gpam(c)


_FAMILIES = {
    "linear-relu": _products(torch.relu),
    "linear-elu1": _products(lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp())),
    "linear-exp": _log_sums(lambda c, x: x),
    "linear-taylor2": lambda c: c.shares((1 + c.logits() + c.logits() ** 2 / 2).log()) @ c.v,
    "linear-identity": _identity,
    "performer": _log_sums(_random_features),
    "cosformer": _cosine,
    "retention": _faded(content=True),
    "decay": _faded(content=False),
    "gpam": _gpam,
    "differential": _differential,
    "differential2": _differential2,
    "logn+gpam": _logn_gpam,
}
NAMES = [name for name in unsoft.mechanisms() if name in _FAMILIES]
