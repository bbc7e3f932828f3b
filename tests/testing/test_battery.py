"""The battery can fail: every property rejects an engine that breaks it, and accepts one that does not."""

from dataclasses import replace

import pytest
import torch

import unsoft
from unsoft import engines
from unsoft.engines import Engine
from unsoft.engines.dense import dense_attention
from unsoft.engines.tiled.tiles import Grid
from unsoft.errors import MechanismError
from unsoft.formula import Formula
from unsoft.testing.battery import THEMES

DECAY = Formula("tanh(s)*exp(-a*abs(i - j))", params={"a": 0.3})

pytestmark = pytest.mark.usefixtures("one_thread")


def right(call):
    return dense_attention(call)[0]


def one_nan(call):
    out = right(call)
    mark = torch.zeros_like(out)
    mark.view(-1)[-1:] = torch.nan
    return out + mark


def last_row_zero(call):
    keep = torch.arange(call.q.shape[2]) < call.q.shape[2] - 1
    return right(call) * keep[:, None]


def with_slopes(factor):
    """The right output, with gradients that are a factor too large."""
    return lambda call: factor * right(call) - (factor - 1) * right(call).detach()


def wrong_pairing(call):
    """Query head h on key head h mod Hk instead of h // group."""
    group = call.q.shape[1] // call.k.shape[1]
    return right(replace(call, k=call.k.repeat(1, group, 1, 1), v=call.v.repeat(1, group, 1, 1)))


def off_by_one(call):
    causal = None if call.causal_offset is None else call.causal_offset + 1
    return right(replace(call, causal_offset=causal))


def mask_off_by_one(call):
    return right(replace(call, visible=None if call.visible is None else call.visible.roll(1, -1)))


def stale_count(call):
    """n is the length of the sequence, not what the row can see."""
    return right(replace(call, counts=torch.full_like(call.counts, call.k.shape[2])))


def without_gradient(name):
    return lambda call: right(
        replace(call, **{name: x.detach() if (x := getattr(call, name)) is not None else None})
    )


def mask_on_the_logit(call):
    return right(replace(call, rule=Formula.from_dict(call.formula.to_dict() | {"bias": "logit"})))


def mask_as_strength(call):
    return right(replace(call, rule=Formula.from_dict(call.formula.to_dict() | {"bias": "strength"})))


def lowest_number_instead_of_masked(call):
    if call.visible is None:
        return right(call)
    bias = torch.where(call.visible, 0.0 if call.bias is None else call.bias, -1e4)
    return right(replace(call, visible=None, bias=bias.to(call.compute_dtype)))


def naive_softmax(call):
    """exp without a peak, in the dtype of the inputs."""
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
    weights = (call.scale * call.q @ k.mT).exp()
    if call.visible is not None:
        weights = weights * call.visible
    if call.causal_offset is not None:
        weights = weights.tril(call.causal_offset)
    return weights / weights.sum(-1, keepdim=True) @ v


def low_precision_softmax(call):
    """Logits and weights are rounded to the dtype of the inputs."""
    if (
        call.q.dtype in (torch.float32, torch.float64)
        or call.bias is not None
        or call.causal_offset is not None
    ):
        return right(call)
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
    logits = call.scale * call.q @ k.mT
    if call.visible is not None:
        logits = logits.masked_fill(~call.visible, -torch.inf)
    return logits.softmax(-1) @ v


def poisoned_by_anything(call):
    return right(call) + 0 * (call.k.sum() + call.v.sum())


def whole_row_poisoned(call):
    out = right(call)
    return torch.where(out.isnan().any(-1, keepdim=True), torch.nan, out)


def own_dropout(call):
    if call.seed is None:
        return right(call)
    return right(replace(call, seed=call.seed + 1))


def dropout_ignored(call):
    return right(replace(call, dropout_p=0.0, seed=None))


def dropout_unseeded(call):
    if call.seed is None:
        return right(call)
    counter.append(0)
    return right(replace(call, seed=call.seed + len(counter)))


def dropout_unscaled(call):
    return right(call) * (1.0 - call.dropout_p)


counter = []


def different_every_time(call):
    counter.append(0)
    return right(call) * (1 + 1e-6 * len(counter))


def writes_to_an_input(call):
    out = right(call).clone()
    call.q.detach().add_(1.0)
    return out


def gives_back_an_input(call):
    alone = (
        call.q.shape == call.v.shape and call.k.shape[2] == 1 and call.visible is None and call.bias is None
    )
    return call.v if alone else right(call)


def first_position_when_alone(call):
    """A decoder that takes its row for the first one."""
    return right(replace(call, causal_offset=None)) if call.q.shape[2] == 1 else right(call)


def leaks_between(dim):
    return lambda call: right(call) + 1e-3 * right(call).cumsum(dim)


def weighs_by_position(call):
    return right(
        replace(call, v=call.v * (1 + 0.01 * torch.arange(call.k.shape[2])[:, None].to(call.v.dtype)))
    )


def nonlinear(call):
    return right(call) + 1e-3 * right(call) ** 2


def mean_for_dead_rows(call):
    out = right(call)
    dead = (out == 0).all(-1, keepdim=True)
    return torch.where(dead, call.v[:, :1].mean(2, keepdim=True), out)


def nothing_for_nothing(call):
    """Refuses empty inputs, as kernels do."""
    if 0 in call.q.shape or 0 in call.k.shape:
        raise RuntimeError("empty")
    return right(call)


def gradient_of_dead_rows(call):
    return right(call) + 1e-3 * (call.q - call.q.detach()).sum(-1, keepdim=True)


def slightly_negative(call):
    return right(replace(call, v=call.v - 1e-3))


def gradient_reaches_back(call):
    """Right values, but every output's gradient also reaches the last key."""
    return right(call) + 1e-3 * (call.k - call.k.detach())[:, :1, -1:, :1]


DEFECTS = {
    # name: (engine, mechanism, theme, property that rejects it)
    "zeros": (lambda call: 0 * right(call), "cog", "parity", "float32 = dense float64"),
    "1% too large": (lambda call: 1.01 * right(call), "softmax", "parity", "float32 = dense float64"),
    "1% too large, float64": (lambda call: 1.01 * right(call), "relu2", "parity", "float64 = dense float64"),
    "swapped heads": (lambda call: right(call).roll(1, 1), "softmax", "parity", "float32 = dense float64"),
    "shifted rows": (lambda call: right(call).roll(1, 2), "cog", "parity", "float32 = dense float64"),
    "reversed values": (
        lambda call: right(replace(call, v=call.v.flip(2))),
        "relu",
        "parity",
        "float32 = dense float64",
    ),
    "mask off by one": (mask_off_by_one, "softmax", "parity", "float32 = dense float64"),
    "no mask": (lambda call: right(replace(call, visible=None)), "sinh", "parity", "float32 = dense float64"),
    "no float mask": (
        lambda call: right(replace(call, bias=None)),
        "l2",
        "parity",
        "float32 = dense float64",
    ),
    "causal off by one": (off_by_one, "softmax", "parity", "float32 = dense float64"),
    "wrong scale": (
        lambda call: right(replace(call, scale=1.01 * call.scale)),
        "cog",
        "parity",
        "float32 = dense float64",
    ),
    "one NaN": (one_nan, "softmax", "parity", "float32 = dense float64"),
    "one wrong row": (last_row_zero, "tanh", "parity", "float32 = dense float64"),
    "wrong dtype": (lambda call: right(call).double(), "softmax", "parity", "float32 = dense float64"),
    "wrong shape": (lambda call: right(call)[..., :1], "softmax", "parity", "float32 = dense float64"),
    "wrong head pairing": (wrong_pairing, "softmax", "parity", "float32 = dense float64"),
    "stale n": (stale_count, "sigmoid", "parity", "float32 = dense float64"),
    "parameters of head 0": (
        lambda call: right(replace(call, params=call.params[:, :1].expand_as(call.params))),
        DECAY,
        "parity",
        "float32 = dense float64",
    ),
    "gradients 1% too large": (with_slopes(1.01), "softpick", "parity", "float32 = dense float64"),
    "no gradient of q": (without_gradient("q"), "softmax", "parity", "float32 = dense float64"),
    "no gradient of k": (without_gradient("k"), "polynomial", "parity", "float32 = dense float64"),
    "no gradient of v": (without_gradient("v"), "cog", "parity", "float32 = dense float64"),
    "no gradient of the mask": (without_gradient("bias"), "softmax", "parity", "float32 = dense float64"),
    "no gradient of parameters": (without_gradient("params"), DECAY, "parity", "float32 = dense float64"),
    "sees the future": (off_by_one, "cog", "causality", "the future is inert"),
    "gradient from the future": (gradient_reaches_back, "cog", "causality", "the future is inert"),
    "n grows with the sequence": (stale_count, "relu2", "causality", "a prefix is stable"),
    "decoder without a position": (first_position_when_alone, DECAY, "decoding", "decode = prefill"),
    "decoder with a stale n": (stale_count, "identity", "decoding", "decode = prefill"),
    "masked keys count": (stale_count, "tanh", "masking", "masked = removed"),
    "mask read as a row": (mask_off_by_one, "softmax", "masking", "masked = removed"),
    "mask gradient not summed": (
        lambda call: (
            right(
                replace(
                    call,
                    bias=None if call.bias is None else call.bias.expand(call.q.shape[0], -1, -1, -1).clone(),
                )
            )
            if call.bias is None or call.bias.shape[0] != 1
            else with_slopes(1.01)(call)
        ),
        "softmax",
        "masking",
        "masks broadcast",
    ),
    "mask flips signs": (mask_on_the_logit, "cog", "masking", "float mask rule"),
    "mask on the strength": (mask_as_strength, "relu2", "masking", "float mask rule"),
    "dead rows average": (mean_for_dead_rows, "softmax", "edges", "dead rows"),
    "dead rows have gradients": (gradient_of_dead_rows, "cog", "edges", "dead rows"),
    "masked is only very small": (lowest_number_instead_of_masked, "softmax", "edges", "dead rows"),
    "nothing visible, something seen": (
        lowest_number_instead_of_masked,
        "softmax",
        "edges",
        "nothing visible",
    ),
    "no empty inputs": (nothing_for_nothing, "softmax", "edges", "empty tensors"),
    "masked NaN leaks": (poisoned_by_anything, "softmax", "nonfinite", "masked NaN is inert"),
    "NaN swallowed": (
        lambda call: right(call).nan_to_num(),
        "cog",
        "nonfinite",
        "visible NaN has a footprint",
    ),
    "NaN spoils whole rows": (whole_row_poisoned, "relu", "nonfinite", "visible NaN has a footprint"),
    "key order matters": (weighs_by_position, "softmax", "equivariance", "keys permute"),
    "rows leak": (leaks_between(2), "softmax", "equivariance", "queries permute"),
    "batch entries leak": (leaks_between(0), "softmax", "equivariance", "batch permutes"),
    "heads leak": (leaks_between(1), "softmax", "equivariance", "heads permute"),
    "not linear": (nonlinear, "softmax", "equivariance", "linear in the values"),
    "computed in bfloat16": (low_precision_softmax, "softmax", "dtypes", "bfloat16 = dense float64"),
    "computed in float16": (low_precision_softmax, "softmax", "dtypes", "float16 = dense float64"),
    "half precision returns float32": (
        lambda call: right(call).float(),
        "cog",
        "dtypes",
        "bfloat16 = dense float64",
    ),
    "exp overflows": (naive_softmax, "softmax", "dtypes", "large logits are finite"),
    "another dropout": (own_dropout, "softmax", "dropout", "engines agree"),
    "no dropout": (dropout_ignored, "cog", "dropout", "share and factor"),
    "dropout without a seed": (dropout_unseeded, "cog", "dropout", "comes from the seed"),
    "dropout without its factor": (dropout_unscaled, "softmax", "dropout", "share and factor"),
    "different every time": (different_every_time, "softmax", "purity", "deterministic"),
    "writes to an input": (writes_to_an_input, "softmax", "purity", "inputs stay as they are"),
    "gives back an input": (gives_back_an_input, "softmax", "purity", "inputs stay as they are"),
    "a negative weight": (slightly_negative, "softmax", "promises", "signs"),
    "a sum below 1": (lambda call: 0.999999 * right(call), "softmax", "promises", "row sums"),
}
DENSE_DEFECTS = {
    "1% too large": (lambda call: 1.01 * right(call), "parity", "dense = definition"),
    "slope too large": (with_slopes(1.01), "gradients", "first derivatives"),
    "tangent too large": (with_slopes(1.01), "gradients", "forward mode"),
    "slope of the slope lost": (None, "gradients", "second derivatives"),
}


class SlopeOnce(torch.autograd.Function):
    """The output with its gradient, which has none of its own."""

    @staticmethod
    def forward(ctx, call, *leaves):
        ctx.call = call
        ctx.save_for_backward(*leaves)
        return right(_with(call, leaves))

    @staticmethod
    def backward(ctx, grad_out):
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = right(_with(ctx.call, leaves))
        grads = torch.autograd.grad(out, leaves, grad_out.detach(), materialize_grads=True)
        return None, *(g + 0 * grad_out.sum() for g in grads)


def _with(call, leaves):
    return replace(call, q=leaves[0], k=leaves[1], v=leaves[2])


def slope_once(call):
    return SlopeOnce.apply(
        replace(call, bias=None if call.bias is None else call.bias.detach()), call.q, call.k, call.v
    )


@pytest.fixture
def engine(monkeypatch):
    """Adds an engine called "broken", or puts one in the place of another."""

    def add(run, name="broken"):
        others = [e for e in engines.POINTWISE.engines if e.name != name]
        monkeypatch.setattr(engines.POINTWISE, "engines", [*others, Engine(name, lambda call: None, run)])

    return add


@pytest.mark.parametrize("defect", DEFECTS)
def test_rejects(defect, engine):
    run, mechanism, theme, promise = DEFECTS[defect]
    engine(run)
    with pytest.raises(MechanismError, match=f"(?m)^  {theme}: {promise} on broken: FAILED"):
        unsoft.testing.check_mechanism(mechanism, engines=["broken"], only=theme, quick=True)


@pytest.mark.parametrize("defect", DENSE_DEFECTS)
def test_rejects_a_broken_specification(defect, engine):
    run, theme, promise = DENSE_DEFECTS[defect]
    engine(run or slope_once, "dense")
    with pytest.raises(MechanismError, match=f"(?m)^  {theme}: {promise} on dense: FAILED"):
        unsoft.testing.check_mechanism("softmax", engines=["dense"], only=theme, quick=True)


def test_every_property_rejects_something():
    rejecting = {(theme, promise) for _, _, theme, promise in DEFECTS.values()}
    rejecting |= {(theme, promise) for _, theme, promise in DENSE_DEFECTS.values()}
    assert rejecting == {(theme, promise.name) for theme, promises in THEMES.items() for promise in promises}


@pytest.mark.parametrize(
    "mechanism", [pytest.param("softmax", marks=pytest.mark.slow), "cog", DECAY], ids=str
)
def test_accepts_a_right_engine(mechanism, engine):
    engine(right)
    report = unsoft.testing.check_mechanism(mechanism, engines=["broken"], quick=True, only=list(THEMES))
    assert report.ok and report.cases > 300


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mechanism",
    [
        "relu",
        "tanh(20*s)/n",
        "where(s > 1, 1, 0)",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("cog", "exp(min(s, 20))/n", "abs(s)**1.5")),
    ],
)
def test_no_false_alarm(mechanism, seed):
    """Jumps, corners, steep and unbounded formulas, on inputs that the other tests do not use."""
    formula = mechanism if mechanism.isalpha() else Formula(mechanism)
    report = unsoft.testing.check_mechanism(
        formula, engines=["dense"], seed=seed, quick=True, only=list(THEMES)
    )
    assert report.ok


def test_quick_rejects_too(engine):
    engine(off_by_one)
    with pytest.raises(MechanismError):
        unsoft.testing.check_mechanism("softmax", engines=["broken"], quick=True, only="causality")


def test_failure_explains_itself_and_can_be_repeated(engine):
    engine(lambda call: 1.01 * right(call))
    own = Formula("tanh(s)/n")
    with pytest.raises(MechanismError) as failure:
        unsoft.testing.check_mechanism(
            own, engines=["broken", "dense"], seed=3, quick=True, only=["parity", "edges"]
        )
    text = str(failure.value)
    assert text.startswith("tanh(s)/n: 2 of ")
    assert "parity: float32 = dense float64 on broken: FAILED: float32, length=" in text
    assert "error" in text and "tolerance" in text
    command = next(line for line in text.splitlines() if "check_mechanism(" in line)
    assert "seed=3" in command and "engines=['broken']" in command
    with pytest.raises(MechanismError):
        eval(command.strip(), {"unsoft": unsoft})


def test_engine_that_raises_is_a_finding(engine):
    def run(call):
        raise ZeroDivisionError("no luck")

    engine(run)
    with pytest.raises(MechanismError, match="on broken: FAILED: raised ZeroDivisionError: no luck"):
        unsoft.testing.check_mechanism("softmax", engines=["broken"], only="purity")


def test_report_reads_as_a_table():
    report = unsoft.testing.check_mechanism("cog", engines=["dense"], quick=True, only=["promises", "edges"])
    lines = str(report).splitlines()
    assert lines[0] == f"cog: {report.cases} comparisons, all hold"
    assert lines[1].split() == ["property", "engine", "cases", "finding"]
    assert any(line.startswith("edges: dead rows") and line.endswith("ok, exact") for line in lines)
    assert any("skipped: the formula is signed" in line for line in lines)
    assert report.ok and report.failures == []


def test_default_engines_are_those_that_support_the_mechanism():
    reports = [unsoft.testing.check_mechanism(m, quick=True, only="purity") for m in ("softmax", "cog")]
    for_softmax, for_cog = ({row.engine for row in report.rows} for report in reports)
    assert for_softmax == set(engines.engine_names()) - {"triton"}, "which needs a GPU"
    assert for_cog == for_softmax - {"sdpa"}


def test_same_seed_same_inputs_and_global_generator_untouched():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    arguments = {"engines": ["dense"], "quick": True, "only": ["parity", "gradients", "dropout", "purity"]}
    first = unsoft.testing.check_mechanism("relu", **arguments)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert str(unsoft.testing.check_mechanism("relu", **arguments)) == str(first)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mechanism": "cogg"}, ValueError, "did you mean 'cog'"),
        ({"mechanism": 3}, TypeError, "mechanism"),
        (
            {"mechanism": "cog", "engines": "dense"},
            TypeError,
            r"engines: expected a list of names such as \['dense'\]",
        ),
        ({"mechanism": "cog", "engines": ["densee"]}, ValueError, "did you mean 'dense'"),
        ({"mechanism": "cog", "only": "party"}, ValueError, "only: unknown theme 'party'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        unsoft.testing.check_mechanism(**arguments)


def test_formulas_with_fields_pass_and_fail_like_others(monkeypatch):
    """Gradients of fields, masks, permutations, decoding; and a kernel with a wrong field is rejected."""
    fading = unsoft.Formula(
        "exp(s*t_i + g_j - k2 - m)",
        "exp(s*t_i + g_j - k2 - m)",
        "s*t_i + g_j - k2",
        fields={"t": "query", "g": "key"},
    )
    themes = ["parity", "causality", "decoding", "masking", "equivariance", "edges"]
    report = unsoft.testing.check_mechanism(fading, engines=["dense", "tiled"], quick=True, only=themes)
    assert report.ok and not any(row.error for row in report.rows)
    symbols = Grid.tile_symbols
    monkeypatch.setattr(
        Grid,
        "tile_symbols",
        lambda *given: {name: x * 1.01 if name == "g_j" else x for name, x in symbols(*given).items()},
    )
    with pytest.raises(MechanismError):
        unsoft.testing.check_mechanism(fading, engines=["tiled"], quick=True, only="parity")
