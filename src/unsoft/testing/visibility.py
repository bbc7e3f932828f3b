"""Themes causality, decoding and masking: rows depend on the keys they may attend to, and on nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from unsoft.testing.case import DOUBLE, Case, CaseInputs, side_of
from unsoft.testing.check import Check, Results, require
from unsoft.testing.reference import Matrices
from unsoft.testing.report import Measure, close, equal, fact

_CAUSAL = [
    Case(7, 7, causal=True),
    Case(70, 70, 16, 8, 1, 2, 1, causal=True),
    Case(9, 70, 8, 8, 1, 4, 2, causal="lower_right"),
    Case(70, 40, 8, 8, 1, 1, 1, causal="lower_right", mask="additive per key"),
    Case(1, 20, causal=True),
    Case(66, 66, causal=True, mask="bool"),
]


@require("causality", "the future is inert", _CAUSAL, slice(None, None, 2))
def _future_is_inert(check: Check, case: Case) -> Iterator[Measure]:
    """Changing every query after row t, and all keys and values it cannot see, changes no bit up to row t.

    The gradients of those keys and values, taken from the rows up to t, are exactly 0.
    """
    inputs = check.draw(case)
    for row in {0, case.length // 2, case.length - 1}:
        seen = max(0, min(case.keys, row + 1 + (case.offset or 0)))
        first_rows = torch.arange(case.length)[:, None] <= row
        until = replace(inputs, grad_out=torch.where(first_rows, inputs.grad_out, 0.0))
        before = check.run(until, torch.float32)
        after = check.run(_with_other_future(until, row, seen), torch.float32)
        label = f"{case}, everything after row {row} changed"
        yield equal(f"{label}: outputs", after["output"][:, :, : row + 1], before["output"][:, :, : row + 1])
        for name in ("key", "value"):
            yield equal(f"{label}: gradient of future {name}", before[name][:, :, seen:], 0.0)


def _with_other_future(inputs: CaseInputs, row: int, seen: int) -> CaseInputs:
    source = torch.Generator().manual_seed(row)
    changed = {}
    starts = {"query": row + 1, "key": seen, "value": seen}
    for name, leaf in inputs.leaves.items():
        if side_of(name) not in starts:
            continue
        start, leaf = starts[side_of(name)], leaf.clone()
        leaf[:, :, start:] = 3 * torch.randn(leaf[:, :, start:].shape, generator=source).double()
        changed[name] = leaf
    return inputs.with_leaves(**changed)


@require(
    "causality", "a prefix is stable", [Case(75, 75, causal=True), Case(9, 9, causal=True, mask="padding")]
)
def _prefix_is_stable(check: Check, case: Case) -> Iterator[Measure]:
    """The first rows of a longer sequence are those of the shorter one (within the float64 gate).

    This detects constants that depend on the length: n counts what a row can see.
    """
    whole, shorter = check.draw(case), case.length // 2 + 1
    leaves = {
        name: x[:, :, :shorter] if x.dim() == 4 or name.startswith("fields.") else x
        for name, x in whole.leaves.items()
    }
    prefix = replace(
        whole,
        case=replace(case, length=shorter, keys=shorter),
        leaves=leaves,
        grad_out=whole.grad_out[:, :, :shorter],
        visible=None if whole.visible is None else whole.visible[..., :shorter],
    )
    size = check.sizes(prefix, (prefix.case, "prefix"))["output"]
    label = f"{case}, first {shorter} rows"
    yield from check.compare_output(label, check.output(whole)[:, :, :shorter], check.output(prefix), size)


@require(
    "decoding",
    "decode = prefill",
    [
        Case(20, 20, causal=True),
        Case(70, 70, 16, 8, 1, 4, 2, causal=True),
        Case(12, 12, causal=True, mask="padding"),
    ],
    slice(2),
)
def _decode_is_prefill(check: Check, case: Case) -> Iterator[Measure]:
    """Rows computed alone (L = 1, 3, 8) against the keys so far, lower right, equal those of one call.

    In float64 and in float32, within the gates.
    """
    inputs, half = check.draw(case), case.length // 2
    sizes = check.sizes(inputs, (case, torch.float32))["output"]
    for dtype in (DOUBLE,) if check.quick else (DOUBLE, torch.float32):
        whole = check.output(inputs, dtype)
        for stop, rows in ((1, 1), (half, 1), (half, 3), (case.length, 1), (case.length, 8)):
            result = check.output(_step(inputs, stop, rows), dtype)
            part = slice(stop - rows, stop)
            label = f"{case}, rows {part.start} to {stop} alone in {dtype}"
            yield from check.compare_output(label, result, whole[:, :, part], sizes[:, :, part], dtype)


def _step(inputs: CaseInputs, stop: int, rows: int) -> CaseInputs:
    """Return the call that a decoder makes for its newest rows when there are ``stop`` keys."""
    starts = {"key": 0, "value": 0, "query": stop - rows}
    leaves = {
        name: x[:, :, starts[side_of(name)] : stop] if side_of(name) in starts else x
        for name, x in inputs.leaves.items()
    }
    case = replace(inputs.case, length=rows, keys=stop, causal="lower_right")
    visible = None if inputs.visible is None else inputs.visible[..., :stop]
    return replace(inputs, case=case, leaves=leaves, visible=visible)


_HIDING = {"False": None, "-inf": -torch.inf, "the lowest number": torch.finfo(DOUBLE).min}
"""Three ways to hide a key."""


@require("masking", "masked = removed", [Case(6, 9, 8, 5, 2, 4, 2), Case(70, 80, 8, 8, 1, 2, 2)], slice(1))
def _masked_is_removed(check: Check, case: Case) -> Iterator[Measure]:
    """Hiding keys gives the same as deleting them, output and gradients, within the float64 gate.

    The gradients of hidden keys and values are exactly 0. Deleting moves the keys behind, so for formulas
    with j only keys at the end are hidden.
    """
    inputs = check.draw(case)
    keep = torch.arange(case.keys) % 3 != 1
    if "j" in check.formula.uses:
        keep = torch.arange(case.keys) < case.keys // 2
    fewer = replace(inputs, case=replace(case, keys=int(keep.sum())), leaves=_kept(inputs.leaves, keep))
    deleted, sizes = check.run(fewer), check.sizes(fewer, (case, "removed"))
    for name, number in _HIDING.items():
        if number is None:
            masked = check.run(replace(inputs, visible=keep))
        else:
            mask = torch.zeros(case.keys, dtype=DOUBLE).masked_fill(~keep, number)
            masked = check.run(inputs.with_leaves(mask=mask))
        yield from check.compare(f"{case}, keys hidden by {name}", _kept(masked, keep), deleted, sizes)
        for leaf in ("key", "value"):
            yield equal(f"{case}, gradient of {leaf} hidden by {name}", masked[leaf][:, :, ~keep], 0.0)


def _kept(results: Results, keep: Tensor) -> Results:
    return {name: x[:, :, keep] if side_of(name) in ("key", "value") else x for name, x in results.items()}


@require("masking", "masks broadcast", [Case(5, 6, 4, 3, 2, 4, 2)])
def _masks_broadcast(check: Check, case: Case) -> Iterator[Measure]:
    """A mask of any broadcastable shape acts like the full one; its gradient is summed accordingly."""
    inputs = check.draw(replace(case, mask="additive"))
    for pattern in list(product((True, False), repeat=4))[:: 3 if check.quick else 1]:
        shape = [1 if one else size for one, size in zip(pattern, case.shape, strict=True)]
        mask = inputs.leaves["mask"][tuple(slice(0, size) for size in shape)]
        short = inputs.with_leaves(mask=mask)
        expected = check.run(inputs.with_leaves(mask=mask.expand(case.shape).contiguous()))
        expected["mask"] = expected["mask"].sum_to_size(mask.shape)
        sizes = check.sizes(short, (case, pattern))
        yield from check.compare(f"{case}, float mask of shape {shape}", check.run(short), expected, sizes)
        seen = mask > -0.5
        result, full = (
            check.output(_with_bool_mask(inputs, m)) for m in (seen, seen.expand(case.shape).contiguous())
        )
        yield from check.compare_output(f"{case}, bool mask of shape {shape}", result, full, sizes["output"])


def _with_bool_mask(inputs: CaseInputs, visible: Tensor | None) -> CaseInputs:
    leaves = {name: x for name, x in inputs.leaves.items() if name != "mask"}
    return replace(inputs, leaves=leaves, visible=visible)


@require(
    "masking", "float mask rule", [Case(6, 8, mask="additive per key"), Case(4, 70, mask="additive per key")]
)
def _float_mask_rule(check: Check, case: Case) -> Iterator[Measure]:
    """A "logit" mask is added to the logit: the same as one more dimension of q and k that produces it.

    A "strength" mask multiplies weights by exp(mask), up to one factor for each row, and changes no sign. Any
    other is added to an expression of the logit, as logn scales it; then the definition is the reference.
    """
    inputs = check.draw(case)
    if check.formula.bias == "strength":
        yield from _as_strength(check, inputs)
        return
    # One more dimension would change the norms of q and k.
    if check.formula.bias == "logit" and not check.formula.uses & {"q2", "k2"}:
        label, expected = "as a part of the logit", check.output(_with_longer_keys(inputs))
    else:
        label, expected = "added last", Matrices(check.formula, inputs).output
    size = check.sizes(inputs, (case, torch.float32))["output"]
    yield from check.compare_output(f"{case}, {label}", check.output(inputs), expected, size)


def _with_longer_keys(inputs: CaseInputs) -> CaseInputs:
    case, scale = inputs.case, inputs.case.width**-0.5
    mask = inputs.leaves["mask"].reshape(case.batch, 1, case.keys, 1).expand(-1, case.kv_heads, -1, -1)
    query, key = inputs.leaves["query"], inputs.leaves["key"]
    longer = _with_bool_mask(inputs, None).with_leaves(
        query=torch.cat([query, torch.ones_like(query[..., :1])], -1), key=torch.cat([key, mask / scale], -1)
    )
    return replace(longer, case=replace(case, width=case.width + 1), options={"scale": scale})


def _as_strength(check: Check, inputs: CaseInputs) -> Iterator[Measure]:
    plain, masked = check.weights(_with_bool_mask(inputs, None)), check.weights(inputs)
    yield fact(f"{inputs.case}: no weight changes its sign", torch.equal(plain.sign(), masked.sign()))
    boosted = plain * inputs.leaves["mask"].exp()
    factor = torch.ones(())
    if check.formula.mass is not None:
        # The factor is the ratio of the normalisers of a row; the largest weight reveals it.
        best = boosted.abs().argmax(-1, keepdim=True)
        factor = masked.gather(-1, best) / boosted.gather(-1, best)
    size = 3 * check.weight_sizes(inputs)  # of the masked weight, the plain one and the factor
    yield close(f"{inputs.case}: weights over exp(mask)", masked, boosted * factor, size, DOUBLE)
