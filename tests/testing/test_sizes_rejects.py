"""The theme "sizes" can fail: planted defects, each of them once real,
are rejected with a message that names the reason."""

import math
import re

import pytest
import torch

import unsoft
from unsoft.formula.analysis import Properties
from unsoft.mechanisms import resolve
from unsoft.mechanisms.gpam import Gpam
from unsoft.modules.pointwise import Pointwise
from unsoft.modules.spec import Family, MechanismSpec
from unsoft.testing.case import Case
from unsoft.testing.definitions import definition_of
from unsoft.testing.family import check_family
from unsoft.testing.grid import AXES, COMBINED, KEYS, all_pairs, sample
from unsoft.testing.sizes import cases_for, module_checks, size_measures

pytestmark = pytest.mark.usefixtures("one_thread")
PROMISES = Properties(signed=True)


class Broken(Pointwise):
    """A formula with a defect, given as a function of the layer and the inputs that may raise or change the
    output."""

    def __init__(self, formula, layer_spec, change=None, cached=None):
        super().__init__(formula, layer_spec)
        self.change, self.cached = change, cached

    def attend(self, inputs):
        out = super().attend(inputs)
        return out if self.change is None else self.change(out, inputs)

    def attend_cached(self, inputs, cache):
        if self.cached is None:
            return super().attend_cached(inputs, cache)
        return self.cached(self, inputs, cache)


def plan(formula, **defect):
    def build(layer_spec):
        return Broken(formula, layer_spec, **defect)

    return MechanismSpec("broken", Family("broken", build, "", PROMISES))


def findings(plan, definition, cases=None):
    """Every comparison that failed."""
    by_name = module_checks(plan, definition, cases or cases_for(plan, 0, quick=True))
    return [
        f"{name}: {measure}"
        for name, checks in by_name.items()
        if checks
        for measure in size_measures(name, checks, "auto")
        if not measure.ok
    ]


def crash(condition, message):
    def change(out, inputs):
        if condition(inputs):
            raise RuntimeError(message)
        return out

    return change


def width(x):
    return x.query.shape[-1]


def zeros_when_wide(out, x):
    return 0 * out if width(x) >= 96 and out.dtype == torch.float32 else out


def slope_of_nan_when_wide(out, x):
    """Right values; the gradient is 0 times infinity."""
    if width(x) in (80, 96) and out.dtype == torch.float32:
        return out + 0 * (x.query - x.query.detach()).sum(-1, keepdim=True).abs().sqrt()
    return out


def off_in_float64(out, x):
    """By 1e5 roundings."""
    return out * (1 + 2e-11) if out.dtype == torch.float64 else out


def empty(x):
    return 0 in x.query.shape or 0 in x.key.shape


def grouped_step(x):
    return x.query.shape[1] != x.key.shape[1] and x.query.shape[2] == 1 and x.options["attn_mask"] is not None


def rows_before_the_first_key(out, x):
    """Differs from the definition where L > S, lower right, with a float mask."""
    mask = x.options["attn_mask"]
    late = x.options["is_causal"] == "lower_right" and x.query.shape[2] > x.key.shape[2]
    return out * 1.001 if late and mask is not None and mask.is_floating_point() else out


def padding_counts(out, x):
    """n counts the keys of the padding too."""
    mask = x.options["attn_mask"]
    if mask is None or mask.dtype != torch.bool:
        return out
    return out * mask.float().mean(-1, keepdim=True).to(out.dtype)


SOFTMAX = {
    "more than 128 tokens": (
        crash(lambda x: x.options["is_causal"] and x.key.shape[2] > 128, "the carried row is narrower"),
        r"raised RuntimeError: the carried row is narrower",
    ),
    "L is not S": (
        crash(
            lambda x: x.query.shape[2] not in (1, x.key.shape[2]) and x.query.shape[2] > 0,
            "17 queries, 150 keys",
        ),
        r"length=(\d+) keys=(?!\1 ).* raised RuntimeError: 17 queries",
    ),
    "zeros for wide heads in float32": (zeros_when_wide, r"width=(96|128|160|256).*dtype=float32.* error"),
    "gradients of wide heads in float32": (
        slope_of_nan_when_wide,
        r"width=(80|96).*gradient of query is finite: this does not hold",
    ),
    "empty sizes": (crash(empty, "reshape of 0 elements"), r"raised RuntimeError: reshape of 0 elements"),
    "a padded step with grouped queries": (
        crash(grouped_step, "size of tensor a (4) must match b (2)"),
        r"length=1 .*raised RuntimeError: size of tensor",
    ),
    "a float mask and L > S": (
        rows_before_the_first_key,
        r"causal=lower_right mask=additive with -inf: \S+.* error",
    ),
    "1e5 roundings": (off_in_float64, r"causal=\S+( mask=[^:]*)?: output: error .* tolerance"),
    "padding counts": (padding_counts, r"mask=(left )?padding.*error"),
    "half the output in bfloat16": (
        lambda out, x: out.float() if out.dtype == torch.bfloat16 else out,
        r"output has dtype torch.bfloat16",
    ),
}


@pytest.mark.parametrize(
    "defect", [pytest.param(x, marks=pytest.mark.slow if i % 2 else ()) for i, x in enumerate(SOFTMAX)]
)
def test_rejects(defect):
    change, message = SOFTMAX[defect]
    failed = findings(plan(resolve("softmax"), change=change), definition_of("softmax"))
    assert any(re.search(message, text) for text in failed), failed


def count_from_zero(layer, inputs, cache):
    """Positions of the rows of a step start at 0, whatever the cache holds."""
    keys, values = cache.append(inputs.key, inputs.value)
    rows, total = inputs.query.shape[2], keys.shape[2]
    seen = torch.ones(rows, total, dtype=torch.bool).tril(total - rows)
    mask = inputs.options["attn_mask"]
    if mask is not None:
        seen = seen & mask if mask.dtype == torch.bool else torch.where(seen, mask, -torch.inf)
    options = inputs.options | {"is_causal": False, "attn_mask": seen}
    return layer.attend(inputs.change(key=keys, value=values, options=options))


def test_positions_counted_from_zero_under_a_cache():
    formula = unsoft.Formula("sigmoid(s)*exp(-0.1*(i - j))/n")
    failed = findings(plan(formula, cached=count_from_zero), definition_of(formula))
    assert {text.partition(":")[0] for text in failed} == {"decoding = definition"}
    assert all("output with a cache: error" in text for text in failed)


class NaivePower(Broken):
    """sign(s) |s|^p by logarithms: the slope by p is 0 times infinity where a logit is 0."""

    def attend(self, inputs):
        q, k, v = (x.double() for x in (inputs.query, inputs.key, inputs.value))
        group = q.shape[1] // k.shape[1]
        s = (inputs.options["scale"] or q.shape[-1] ** -0.5) * q @ k.repeat_interleave(group, 1).mT
        weights = s.sign() * (self.values["p"][:, None, None] * s.abs().log()).exp()
        return (weights @ v.repeat_interleave(group, 1)).to(inputs.query.dtype)


class NaiveSoftmax(Broken):
    """exp(s) over its sum, without a peak."""

    def attend(self, inputs):
        q, k, v = inputs.query, inputs.key, inputs.value
        group = q.shape[1] // k.shape[1]
        weights = (
            (inputs.options["scale"] or q.shape[-1] ** -0.5) * q @ k.repeat_interleave(group, 1).mT
        ).exp()
        return weights / weights.sum(-1, keepdim=True) @ v.repeat_interleave(group, 1)


class CancellingSoftpick(Broken):
    """exp(s) - 1, which loses all digits near 0."""

    def attend(self, inputs):
        q, k, v = inputs.query, inputs.key, inputs.value
        group = q.shape[1] // k.shape[1]
        s = (inputs.options["scale"] or q.shape[-1] ** -0.5) * q @ k.repeat_interleave(group, 1).mT
        size = s.exp() - 1
        total = size.abs().sum(-1, keepdim=True)
        return size.relu() / torch.where(total == 0, 1.0, total) @ v.repeat_interleave(group, 1)


class ScaledMask(Broken):
    """The factor of logn on the float mask too."""

    def attend(self, inputs):
        mask = inputs.options["attn_mask"]
        if mask is not None and mask.is_floating_point():
            keys = (mask > -torch.inf).sum(-1, keepdim=True).clamp(min=1)
            inputs = inputs.change(
                options=inputs.options | {"attn_mask": mask * (keys.log() / math.log(512))}
            )
        return super().attend(inputs)


@pytest.mark.parametrize(
    ("layer", "mechanism", "message"),
    [
        (
            NaivePower,
            unsoft.Formula("sign(s)*abs(s)**p", params={"p": 1.5}),
            r"inputs=zero rows.*gradient of values\.p is finite",
        ),
        (NaiveSoftmax, "softmax", r"inputs=logits of 1e4.*is finite: this does not hold"),
        (CancellingSoftpick, "softpick", r"inputs=logits of 1e-30.*output: error"),
        (ScaledMask, "logn+softmax", r"mask=additive.*output: error"),
    ],
)
def test_rejects_arithmetic(layer, mechanism, message):
    """Without masks and causality, which these layers do not know."""
    formula = resolve(mechanism)
    broken = MechanismSpec(
        "broken", Family("broken", lambda layer_spec: layer(formula, layer_spec), "", PROMISES)
    )
    points = [p for p in COMBINED if p.causal is False and (p.mask == "none" or layer is ScaledMask)]
    failed = findings(broken, definition_of(mechanism), tuple(points))
    assert any(re.search(message, text) for text in failed), failed


class DeafToEngines(Broken):
    def attend(self, inputs):
        return super().attend(inputs.change(options=inputs.options | {"engine": "auto"}))


def test_rejects_an_engine_that_is_dropped():
    broken = MechanismSpec(
        "broken", Family("broken", lambda layer_spec: DeafToEngines(resolve("cog"), layer_spec), "", PROMISES)
    )
    rows = {row.theme: row for row in check_family(broken, 0)}
    assert rows["engines"].finding == "FAILED: an unknown engine raises ValueError: this does not hold"
    assert all(row.ok for theme, row in rows.items() if theme != "engines")


def test_accepts_what_is_right():
    assert findings(plan(resolve("softmax")), definition_of("softmax")) == []


def test_accepts_a_mask_added_to_an_expression_of_the_logit():
    scaled = unsoft.Formula("exp(2*s - m)", "exp(2*s - m)", "2*s", bias="2*s")
    case = "length=9 mask=additive with -inf causal=False"
    assert unsoft.testing.check_mechanism(scaled, engines=["dense"], case=case).ok


def test_a_failure_prints_the_case_that_repeats_it(monkeypatch):
    monkeypatch.setattr(Gpam, "strengths", lambda self: (self.plus.sigmoid(), self.plus.sigmoid()))
    with pytest.raises(unsoft.errors.MechanismError) as failure:
        unsoft.testing.check_mechanism("gpam", seed=3, only="sizes", quick=True)
    command = next(line for line in str(failure.value).splitlines() if "check_mechanism(" in line)
    assert "case='length=" in command and "seed=3" in command
    with pytest.raises(unsoft.errors.MechanismError):
        eval(command.strip(), {"unsoft": unsoft})


def test_one_case_runs_on_every_engine():
    report = unsoft.testing.check_mechanism("cog", case="length=9 dtype=float32")
    assert {row.engine for row in report.rows if row.cases} >= {"auto", "dense", "tiled"}


def axis_values(cases, axis):
    """The values of an axis in some cases, as AXES writes them."""
    if axis == "keys":
        return {name for case in cases for name, count in KEYS.items() if case.keys == count(case.length)}
    if axis == "value_width":
        return {"same" if case.value_width == case.width else case.value_width for case in cases}
    if axis == "heads":
        return {(case.heads, case.kv_heads) for case in cases}
    return {getattr(case, axis) for case in cases}


def test_a_sample_shows_every_value_of_every_axis():
    for seed in range(20):
        cases = sample(f"{seed} cog")
        for axis, values in AXES.items():
            missing = set(values) - axis_values(cases, axis)
            assert missing <= {(4, 2), (4, 1), 2}, (
                axis,
                missing,
            )  # long cases have fewer heads and sequences


def test_all_pairs_shows_every_pair():
    cases = list(all_pairs("0 cog"))
    for a, b in [("length", "width"), ("dtype", "inputs"), ("mask", "causal"), ("length", "dtype")]:
        assert len({(getattr(x, a), getattr(x, b)) for x in cases}) == len(AXES[a]) * len(AXES[b])
    assert len(cases) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lenght=3", "unknown lenght"),
        ("mask=soft", "mask='soft' is not one of none"),
        ("dtype=float8", "is not one of float64"),
    ],
)
def test_bad_cases(text, message):
    with pytest.raises(ValueError, match=message):
        Case.parse(text)


ONE_BY_ONE = "length=2 width=1/5 heads=4/1 batch=2 dtype=float32 inputs=opposite keys mask=dead rows"
PIECES = "length=129 width=1 heads=4/2 batch=2 inputs=zero rows mask=bool"
LARGE = "dtype=float32 inputs=logits of 1e4 causal=False"
OPPOSITE = "length=511 keys=498 width=128/40 heads=4/2 inputs=opposite keys mask=padding causal=False"


@pytest.mark.parametrize(
    ("name", "options", "case"),
    [
        ("linear-taylor2", {}, ONE_BY_ONE),  # a mask by rows looks like padding in steps of one token
        (
            "magnitude+differential2",
            {"where": "mass", "causal": "prefix"},
            PIECES,
        ),  # a key that no row sees in its own step
        ("gau+softmax", {}, LARGE),  # the gradient of a weight of 1, times a gate of thousands
        ("magnitude", {}, OPPOSITE),  # steps that amplify small errors, but not large ones
    ],
)
def test_nothing_is_asked_that_nobody_can_know(name, options, case):
    unsoft.testing.check_mechanism(name, options=options, case=case, seed=0, engines=["auto"], only="sizes")
