"""A masked key is as good as removed, and an additive mask does what its formula's rule says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from unsoft.testing.case import DOUBLE, Case, Inputs, side_of
from unsoft.testing.check import Check, Property, Results
from unsoft.testing.matrices import Matrices
from unsoft.testing.measure import Measure, close, equal, fact

CASES = [Case(6, 9, 8, 5, 2, 4, 2), Case(70, 80, 8, 8, 1, 2, 2)]
HIDING = {"False": None, "-inf": -torch.inf, "the lowest number": torch.finfo(DOUBLE).min}
"""Three ways to hide a key."""


def masked_is_removed(check: Check) -> Iterator[Measure]:
    """Hiding keys gives what deleting them gives, output and gradients, within the float64 gate.

    The gradients of hidden keys and values are exactly 0.

    Deleting moves the keys behind, so for formulas with j only keys at the end are hidden.
    """
    yield from check.over(CASES[:1] if check.quick else CASES, lambda case: _removed(check, case))


def _removed(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    keep = torch.arange(case.keys) % 3 != 1
    if "j" in check.formula.uses:
        keep = torch.arange(case.keys) < case.keys // 2
    leaves = _kept(inputs.leaves, keep)
    fewer = replace(inputs, case=replace(case, keys=int(keep.sum())), leaves=leaves)
    deleted, sizes = check.run(fewer), check.sizes(fewer, (case, "removed"))
    for name, number in HIDING.items():
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


def masks_broadcast(check: Check) -> Iterator[Measure]:
    """A mask of any broadcastable shape acts like the full one; its gradient is summed accordingly."""
    case = Case(5, 6, 4, 3, 2, 4, 2)
    small = list(product((True, False), repeat=4))
    yield from check.over([case], lambda case: _broadcast(check, case, small[::3] if check.quick else small))


def _broadcast(check: Check, case: Case, patterns: list[tuple[bool, ...]]) -> Iterator[Measure]:
    inputs = check.draw(replace(case, mask="additive"))
    for pattern in patterns:
        shape = [1 if one else size for one, size in zip(pattern, case.shape, strict=True)]
        mask = inputs.leaves["mask"][tuple(slice(0, size) for size in shape)]
        short = inputs.with_leaves(mask=mask)
        full = inputs.with_leaves(mask=mask.expand(case.shape).contiguous())
        expected = check.run(full)
        expected["mask"] = expected["mask"].sum_to_size(mask.shape)
        sizes = check.sizes(short, (case, pattern))
        yield from check.compare(f"{case}, float mask of shape {shape}", check.run(short), expected, sizes)
        seen = mask > -0.5
        results, expected = (
            {"output": check.output(_hidden(inputs, m))} for m in (seen, seen.expand(case.shape).contiguous())
        )
        yield from check.compare(f"{case}, bool mask of shape {shape}", results, expected, sizes)


def _hidden(inputs: Inputs, visible: Tensor | None) -> Inputs:
    leaves = {name: x for name, x in inputs.leaves.items() if name != "mask"}
    return replace(inputs, leaves=leaves, visible=visible)


def float_mask_rule(check: Check) -> Iterator[Measure]:
    """A "logit" mask is added to the logit: the same as one more dimension of q and k that produces it.

    A "strength" mask multiplies weights by exp(mask), up to one factor for each row, and changes no sign. Any
    other is added to an expression of the logit, as logn scales it.
    """
    rule = {"logit": _as_logit, "strength": _as_strength}.get(check.formula.bias, _as_defined)
    if rule is _as_logit and check.formula.uses & {"q2", "k2"}:  # one more dimension makes them longer
        rule = _as_defined
    yield from check.over(
        [Case(6, 8, mask="additive per key"), Case(4, 70, mask="additive per key")], lambda c: rule(check, c)
    )


def _as_logit(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    scale = case.width**-0.5
    mask = inputs.leaves["mask"].reshape(case.batch, 1, case.keys, 1).expand(-1, case.kv_heads, -1, -1)
    query, key = inputs.leaves["query"], inputs.leaves["key"]
    longer = _hidden(inputs, None).with_leaves(
        query=torch.cat([query, torch.ones_like(query[..., :1])], -1), key=torch.cat([key, mask / scale], -1)
    )
    longer = replace(longer, case=replace(case, width=case.width + 1), options={"scale": scale})
    sizes = check.sizes(inputs, (case, torch.float32))
    expected = {"output": check.output(longer)}
    yield from check.compare(
        f"{case}, as a part of the logit", {"output": check.output(inputs)}, expected, sizes
    )


def _as_defined(check: Check, case: Case) -> Iterator[Measure]:
    """Added to an expression of the logit: the definition says the rest."""
    inputs = check.draw(case)
    expected = {"output": Matrices(check.formula, inputs).output}
    sizes = check.sizes(inputs, (case, torch.float32))
    yield from check.compare(f"{case}, added last", {"output": check.output(inputs)}, expected, sizes)


def _as_strength(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    plain, masked = check.weights(_hidden(inputs, None)), check.weights(inputs)
    yield fact(f"{case}: no weight changes its sign", torch.equal(plain.sign(), masked.sign()))
    boosted = plain * inputs.leaves["mask"].exp()
    factor = torch.ones(())
    if check.formula.mass is not None:
        # The factor is whatever the new normaliser makes of a row; the largest weight tells it.
        best = boosted.abs().argmax(-1, keepdim=True)
        factor = masked.gather(-1, best) / boosted.gather(-1, best)
    size = 3 * check.weight_sizes(inputs)  # of the masked weight, the plain one and the factor
    yield close(f"{case}: weights over exp(mask)", masked, boosted * factor, size, DOUBLE)


PROPERTIES = [
    Property("masked = removed", masked_is_removed),
    Property("masks broadcast", masks_broadcast),
    Property("float mask rule", float_mask_rule),
]
