"""parallax: softmax attention with a first-order correction: signed weights that sum to 1.

    a_j = p_j (1 + sum_l p_l t_l - t_j)          p = softmax(s),   t_j = r . k_j,   r = x W

Paper: Zuo et al., Parallax: Parameterized Local Linear Attention for Language Modeling, arXiv 2605.29157. The
weights were checked against ``naive_parallax`` of fla-org/flash-linear-attention, contributed by the authors;
t is not scaled by 1/sqrt(d) there either.

r comes from the hidden state if ``hidden=`` brings it, otherwise from the query, with one matrix per head (so
in a swapped model, where the paper would rotate r like q). Ours: W begins at 0, so that training begins with
softmax. The paper reports gains at 0.6B and 1.7B parameters, with the optimizer Muon; we tested neither.

Why it subtracts: the correction is the derivative of softmax attention in the direction r, so the output is
that of a query moved by -r, to first order. Where softmax takes a local mean, this fits a local slope.

Strengths: it subtracts, without giving up that rows sum to 1; with r = 0 it is softmax.
Limitations: weights are unbounded, since t is; a row that sees one key can only copy it. Training writes the
weights out, so memory grows with queries times keys; without gradients it takes the kernels of softmax.

>>> import math, torch
>>> from unsoft.modules.build import mechanism
>>> layer = mechanism("parallax", heads=1, head_dim=1)
>>> _ = torch.nn.init.ones_(layer.factor.weight)                                 # r = q
>>> k = torch.tensor([2.0, 0.0]).view(1, 1, 2, 1)
>>> layer(torch.ones(1, 1, 1, 1), k, k, scale=math.log(3) / 2, return_weights=True)[1][0, 0]
tensor([[0.3750, 0.6250]], grad_fn=<SelectBackward0>)

p is 3/4 and 1/4, t is 2 and 0, so the sum is 3/2: the weights are 3/4 (1 + 3/2 - 2) and 1/4 (1 + 3/2).
"""

from dataclasses import replace

import torch
from torch import Tensor

from unsoft.engines.call import Call, compute_dtype
from unsoft.engines.dense import dense_logits
from unsoft.engines.native.direct import observed
from unsoft.formula import ONE, Properties
from unsoft.modules.definition import Layer, WrittenCall, shares
from unsoft.modules.module import Inputs, Result, TokenFactor
from unsoft.modules.registry import family, resolve_formula
from unsoft.modules.rows import WrittenOut
from unsoft.modules.spec import LayerSpec

_LONG = 64
"""Queries from which two passes of a kernel take less time than written-out weights."""


class Parallax(WrittenOut):
    """See the module's docstring."""

    def __init__(self, layer_spec: LayerSpec) -> None:
        super().__init__(layer_spec)
        self.factor = TokenFactor(layer_spec, width=layer_spec.head_dim)

    def attend(self, inputs: Inputs) -> Result:
        options = inputs.options
        if (
            torch.is_grad_enabled()
            or inputs.return_weights
            or inputs.query.shape[-2] < _LONG
            or options["dropout_p"]
            or options["engine"] != "auto"
            or torch.compiler.is_compiling()
            or observed()
        ):
            return super().attend(inputs)
        return self._by_kernels(inputs.as_autocast())

    def _by_kernels(self, inputs: Inputs) -> Result:
        """Return the output in memory linear in the length, from a forward and a backward pass of softmax.

        The correction is -d/dq attention(q) in the direction r. A backward pass computes the adjoint of that,
        sum_j p_j (r v_j - mean) k_j; with values k, and keys (k, v) that a query (q, 0) attends to as before,
        it returns sum_j p_j (r k_j - mean) v_j besides.
        """
        query, key, value, width = inputs.query, inputs.key, inputs.value, inputs.query.shape[-1]
        given = inputs.options["scale"]
        scale = width**-0.5 if given is None else given
        softmax = resolve_formula("softmax")
        first = inputs.run(softmax)
        assert isinstance(first, Tensor)
        wide = compute_dtype(query.dtype)
        r = self.factor(query.to(wide), inputs.hidden)
        q, k, v = (x.to(wide) for x in (query, key, value))
        with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
            q = torch.cat((q, q.new_zeros(*q.shape[:-1], v.shape[-1])), dim=-1).requires_grad_()
            moved = inputs.change(query=q, key=torch.cat((k, v), dim=-1), value=k, hidden=None)
            out = moved.with_options(scale=scale).run(softmax)
            (gradient,) = torch.autograd.grad(out, q, r)
        correction: Tensor = gradient[..., width:] / scale
        return first - correction.to(first.dtype)

    def weights_of(self, call: Call, logits: Tensor, visible: Tensor, inputs: Inputs) -> Tensor:
        # In the dtype of the arithmetic: t is not scaled, and grows with the width.
        r = self.factor(inputs.query.to(call.compute_dtype), inputs.hidden).reshape(call.q.shape)
        t, _ = dense_logits(replace(call, q=r, scale=1.0, bias=None))
        live = visible.any(-1, keepdim=True)
        p = logits.masked_fill(~visible & live, -torch.inf).softmax(-1)
        weights: Tensor = p * (1 + (p * t).sum(-1, keepdim=True) - t)
        return weights


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """p (1 + sum p t - t) with t = r k (Zuo et al. 2026)."""
    r = call.move(call.query @ layer.factor.weight + layer.factor.constant[:, None])
    t = call.move(r @ call.spread(call.key).mT)
    p = shares(call.logits + call.bias, call.visible)
    return p * (1 + (p * t).sum(-1, keepdim=True) - t)


family(
    "parallax",
    Parallax,
    summary="softmax with a first-order correction: signed weights that sum to 1",
    paper="Zuo et al. 2026, arXiv 2605.29157",
    properties=Properties(signed=True, row_sum=ONE),
)
