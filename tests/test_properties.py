"""Generated cases: random sizes, masks, layouts and formulas, the same in every run."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings

import unsoft
from unsoft.formula import Formula
from unsoft.mechanisms import formulas, resolve
from unsoft.testing.case import LAYOUTS, MASKS, Case
from unsoft.testing.check import Check
from unsoft.testing.report import NotApplicable

EXAMPLES = settings(
    max_examples=80, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NAMES = list(formulas())
pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def cases(draw, **fixed):
    kv_heads = draw(st.integers(1, 3))
    options = {
        "length": draw(st.integers(1, 70)),
        "keys": draw(st.integers(1, 70)),
        "width": draw(st.integers(1, 20)),
        "value_width": draw(st.integers(1, 20)),
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "mask": draw(st.sampled_from(sorted(MASKS))),
        "causal": draw(st.sampled_from([False, True, "lower_right"])),
        "layout": draw(st.sampled_from(sorted(LAYOUTS))),
        "spread": draw(st.sampled_from([0.1, 1.0, 4.0])),
        "dropout": draw(st.sampled_from([0.0, 0.0, 0.4])),
    }
    return Case(**options | fixed)


@st.composite
def random_formulas(draw):
    """Formulas of bounded growth: some function of s, with or without a normaliser, n, i, j, parameters."""
    inner = draw(st.sampled_from(["s", "b*s", "s - c", "s + 1/(1 + j)", "s/(1 + abs(i - j))", "2*s"]))
    function = draw(
        st.sampled_from(
            [
                "{}",
                "tanh({})",
                "max({}, 0)",
                "abs({})",
                "erf({})",
                "sigmoid({})",
                "({})**3",
                "({})**2",
                "where({} > 0.3, 1, {})",
                "min({}, 1)",
                "sign({})*sqrt(abs({}) + 0.1)",
                "relu({})",
                "log(1 + ({})**2)",
            ]
        )
    )
    weight = function.replace("{}", f"({inner})")
    if draw(st.booleans()):
        text = f"({weight})*{draw(st.sampled_from(['1', '1/n', '1/sqrt(n)', 'b']))}"
        return Formula(text, params=_params(text))
    peak = draw(st.sampled_from(["s", "abs(s)", "max(s, 0)", "b*s"]))
    norm = draw(st.sampled_from([None, "z + exp(-m)", "b*z"]))
    params = _params(f"{weight} {peak} {norm}")
    return Formula(
        f"({weight})*exp({peak} - m)", f"(1 + abs({weight}))*exp({peak} - m)", peak, norm=norm, params=params
    )


def _params(text):
    """Return the parameters that a formula uses: others are an error."""
    return {name: value for name, value in (("b", 0.7), ("c", 0.2)) if re.search(rf"\b{name}\b", text)}


def check(formula, engine, case, dtype):
    try:
        for measure in Check(formula, engine).against_dense(case, dtype):
            assert measure.ok, str(measure)
    except NotApplicable:  # the exact result is too large for the dtype
        reject()


@EXAMPLES
@given(
    case=cases(),
    mechanism=st.sampled_from(NAMES),
    dtype=st.sampled_from(DTYPES),
    engine=st.sampled_from(["native", "tiled"]),
)
def test_fused_engines_equal_dense(case, mechanism, dtype, engine):
    check(resolve(mechanism), engine, case, dtype)


@EXAMPLES
@given(case=cases(), formula=random_formulas())
def test_any_formula_runs_tiled(case, formula):
    check(formula, "tiled", case, torch.float32)


@settings(EXAMPLES, max_examples=5)
@given(case=cases(), formula=random_formulas())
def test_any_formula_runs_native(case, formula):
    """Each example compiles a library."""
    check(formula, "native", case, torch.float32)


@EXAMPLES
@given(
    case=cases(dropout=0.0),
    mechanism=st.sampled_from(NAMES),
    engine=st.sampled_from(["native", "tiled", "dense"]),
    data=st.data(),
)
def test_rows_are_independent_of_each_other(case, mechanism, engine, data):
    """Some rows of a call, computed alone with their rows of the mask, are those rows of the whole call."""
    subject = Check(resolve(mechanism), engine)
    case = replace(case, causal=False, mask=data.draw(st.sampled_from(["none", "bool", "additive"])))
    inputs = subject.draw(case)
    start = data.draw(st.integers(0, case.length - 1))
    rows = slice(start, data.draw(st.integers(start + 1, case.length)))
    leaves = {name: x[:, :, rows] if name in ("query", "mask") else x for name, x in inputs.leaves.items()}
    visible = None if inputs.visible is None else inputs.visible[:, :, rows]
    alone = replace(inputs, case=replace(case, length=rows.stop - rows.start), leaves=leaves, visible=visible)
    part, whole = subject.output(alone), subject.output(inputs)[:, :, rows]
    size = {"output": subject.sizes(inputs, 0)["output"][:, :, rows]}
    assert all(m.ok for m in subject.compare("rows", {"output": part}, {"output": whole}, size))


@EXAMPLES
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    mechanism=st.sampled_from(NAMES),
    causal=st.booleans(),
    engine=st.sampled_from(["native", "tiled"]),
)
def test_packed_sequences_equal_separate_ones(lengths, mechanism, causal, engine):
    """Several sequences in one call, kept apart by a block mask."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    q, k, v = (torch.randn(1, 2, len(document), 6, dtype=torch.float64) for _ in range(3))
    apart = document[:, None] == document
    packed = unsoft.attention(q, k, v, mechanism, attn_mask=apart, is_causal=causal, engine=engine)
    parts = [x.split(lengths, dim=2) for x in (q, k, v)]
    separate = [
        unsoft.attention(*part, mechanism, is_causal=causal, engine=engine)
        for part in zip(*parts, strict=True)
    ]
    assert torch.allclose(packed, torch.cat(separate, 2), rtol=1e-10, atol=1e-12)


@EXAMPLES
@given(
    case=cases(dropout=0.0, layout="contiguous"),
    mechanism=st.sampled_from(["softmax", "l2"]),
    shift=st.floats(-50, 50),
    engine=st.sampled_from(["native", "tiled", "dense"]),
)
def test_shift_of_a_row_of_logits(case, mechanism, shift, engine):
    """Adding a constant to a row of logits changes nothing for mechanisms that only compare them."""
    subject = Check(resolve(mechanism), engine)
    inputs = subject.draw(replace(case, mask="additive"))
    moved = inputs.with_leaves(mask=inputs.leaves["mask"] + shift)
    results, expected = ({"output": subject.output(x)} for x in (moved, inputs))
    assert all(m.ok for m in subject.compare("shifted", results, expected, subject.sizes(moved, 0)))


@EXAMPLES
@given(
    case=cases(dropout=0.0),
    dtype=st.sampled_from(DTYPES),
    engine=st.sampled_from(["native", "tiled", "dense"]),
)
def test_softmax_stays_between_its_values(case, dtype, engine):
    subject = Check(resolve("softmax"), engine)
    inputs = subject.draw(case, torch.float32 if dtype == torch.float64 else dtype)
    out = subject.output(inputs, dtype).double()
    v = LAYOUTS[case.layout](inputs.leaves["value"]).repeat_interleave(case.heads // case.kv_heads, 1)
    slack = 4 * torch.finfo(dtype).eps * v.abs().amax()
    low, high = (
        v.amin(2, keepdim=True).clamp(max=0) - slack,
        v.amax(2, keepdim=True).clamp(min=0) + slack,
    )  # 0: dead rows
    assert bool(((out >= low) & (out <= high)).all())


@EXAMPLES
@given(
    case=cases(dropout=0.0, layout="contiguous"),
    mechanism=st.sampled_from(["softmax", "cog", "l2", "softmax1"]),
    engine=st.sampled_from(["native", "tiled", "dense"]),
)
def test_sharp_logits_pick_the_best_key(case, mechanism, engine):
    """As the scale grows, the key of the largest logit (cog: in absolute value) takes everything."""
    case = replace(case, mask="none", causal=False)
    subject = Check(resolve(mechanism), engine)
    inputs = subject.draw(case)
    group = case.heads // case.kv_heads
    k, v = (inputs.leaves[name].repeat_interleave(group, 1) for name in ("key", "value"))
    logits = inputs.leaves["query"] @ k.mT
    strength = logits.abs() if mechanism == "cog" else logits
    top = strength.topk(min(2, case.keys), -1).values
    clear = (top[..., 0] - top[..., -1] > 1e-3) | (case.keys == 1)
    if mechanism == "softmax1":
        clear &= top[..., 0] > 1e-3
    best = strength.argmax(-1, keepdim=True)
    expected = v.gather(2, best.expand(-1, -1, -1, v.shape[-1]))
    if mechanism == "cog":
        expected = expected * logits.gather(-1, best).sign()
    out = subject.output(replace(inputs, options={"scale": 1e5}))
    assert torch.allclose(out[clear], expected[clear], atol=1e-12)
