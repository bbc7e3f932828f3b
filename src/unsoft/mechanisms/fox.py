"""fox: forgetting attention: softmax whose logits fade by a gate of every token that lies between.

    a_ij = softmax_j( s_ij + c_i - c_j )          c_t = log f_1 + ... + log f_t,   f_t = sigmoid(x_t w + b)

Paper: Lin et al., Forgetting Transformer: Softmax Attention with a Forget Gate, arXiv 2503.02130 (ICLR 2025).

Strengths: it forgets by content. A token that closes its gate hides everything before it, head by head; no
other positions are needed.
Limitations: it cannot look ahead, subtract, or attend to nothing. With all gates open (f = 1) it is softmax;
with a constant gate it is ALiBi.

The gate comes from the hidden state if ``hidden=`` brings it, as in the paper, otherwise from the key. At the
start w = 0 and b = 4, so a token fades by the factor 0.98 a step. A key that the mask hides from every row
(padding) has no gate.

>>> import torch
>>> from unsoft.modules.build import mechanism
>>> layer = mechanism("fox", heads=1, head_dim=4, start=0.0)                  # every gate is 1/2
>>> k = torch.randn(1, 1, 3, 4)
>>> _, weights = layer(torch.zeros(1, 1, 3, 4), k, k, is_causal=True, return_weights=True)
>>> weights[0, 0, 2]                                                          # 1/4, 1/2 and 1, over their sum
tensor([0.1429, 0.2857, 0.5714], grad_fn=<SelectBackward0>)
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unsoft.engines.call import compute_dtype, finite_part
from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Layer, WrittenCall, shares
from unsoft.modules.module import TokenFactor, Values, check_hidden
from unsoft.modules.pointwise import FieldSource, Tokens, field_family
from unsoft.modules.spec import LayerSpec

FOX = Formula(
    weight="exp(s + (c_i - c_j) - m)",
    mass="exp(s + (c_i - c_j) - m)",
    peak="s + (c_i - c_j)",
    fields={"c": "query+key"},
    name="fox",
    paper="Lin et al. 2025, arXiv 2503.02130",
    summary="softmax that forgets: every token fades what came before it",
    facts=Facts(signed=False),
)
_FADES_SLOWLY, _OPEN = 4.0, 12.0


class ForgetGate(FieldSource):
    """c: the sum of the logarithms of all gates so far."""

    causal_only = True
    uses_hidden = True

    def __init__(self, layer_spec: LayerSpec, start: float = _FADES_SLOWLY) -> None:
        super().__init__(layer_spec)
        self.gate = TokenFactor(layer_spec, width=1, start=start)

    def forward(self, tokens: Tokens) -> Mapping[str, Values]:
        key, hidden = tokens.key, tokens.hidden
        wide = compute_dtype(key.dtype)
        check_hidden("fox", hidden, key.shape[-2])
        # What is not finite makes the rows that see it NaN, not the gates of all tokens after it.
        x = finite_part((key if hidden is None else hidden).to(wide))
        if hidden is None:
            factor = self.gate(x.repeat_interleave(self.layer_spec.heads // key.shape[-3], dim=-3), None)
        else:
            factor = self.gate(x, x)
        log_gates = logsigmoid(factor[..., 0])
        if tokens.there is not None:
            log_gates = torch.where(tokens.there, log_gates, 0.0)
        c = log_gates.cumsum(-1) if key.shape[-2] > 1 else log_gates
        if "c" in tokens.past:
            c = c + tokens.past["c"][..., -1:]
        if tokens.query.shape[-2] == key.shape[-2] == 1:  # a step of decoding
            return {"c": (c, c)}
        # c_i cancels in the row's normaliser; that of the nearest key keeps the exponents small.
        rows = torch.arange(tokens.query.shape[-2], device=key.device) + tokens.offset
        nearest = c[..., rows.clamp(0, key.shape[-2] - 1)] if key.shape[-2] else rows.to(wide)
        return {"c": (nearest, c)}

    @torch.no_grad()
    def open_start(self) -> None:
        """Let a token fade by 6e-6 a step: by 5 % in 8,192."""
        self.gate.constant.fill_(_OPEN)


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """softmax(s + d) with d_ij the sum of log f_t over the tokens t = j + 1 ... i (Lin et al. 2025)."""
    gate = layer.source.gate
    log_gates = (call.spread(call.key) @ gate.weight + gate.constant[:, None]).sigmoid().log()[..., 0]
    log_gates = torch.where(call.there, log_gates, 0.0)
    t = torch.arange(call.key.shape[2])
    to_row = log_gates @ (t[:, None] <= call.rows).to(log_gates.dtype)
    to_key = log_gates @ (t[:, None] <= t).to(log_gates.dtype)
    faded = to_row[..., :, None] - to_key[..., None, :]
    return shares(call.logits + faded + call.bias, call.visible)


field_family("fox", FOX, fields_from=ForgetGate)
