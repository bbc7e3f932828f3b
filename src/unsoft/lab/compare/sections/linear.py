"""Mathematics of linear attention and of decay: norms, ranks, closed forms. Only claims, no figures."""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch

from unsoft import measure, theory
from unsoft.lab.compare.candidate import Candidate, normals
from unsoft.lab.compare.jobs import Results, RowIterator
from unsoft.lab.compare.section import SU, Finding, Section
from unsoft.lab.evidence import grade

WIDTHS = (2, 4, 8, 16, 32, 64, 128, 256)


SECTION = Section(order=70)


@SECTION.fact(0.3)
def norm_ratios() -> RowIterator:
    """Find the largest |q|_2 / |q|_1 by ascent from random non-negative queries, and at one-hot ones."""
    generator = torch.Generator().manual_seed(6)
    for width in WIDTHS:
        q = torch.rand(64, width, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(200):
            (slope,) = torch.autograd.grad((q.norm(dim=-1) / q.abs().sum(-1)).sum(), q)
            with torch.no_grad():
                q += 0.5 * q.norm(dim=-1, keepdim=True) * slope
                q.clamp_(min=0)
        climbed = float((q.norm(dim=-1) / q.abs().sum(-1)).max().detach())
        one_hot = torch.eye(width, dtype=torch.float64)[0]
        largest = max(climbed, float(one_hot.norm() / one_hot.abs().sum()))
        yield {"width": width, "largest": largest, "sqrt": math.sqrt(width)}


@SECTION.fact(0.1)
def causal_ranks() -> RowIterator:
    """Measure the rank of the attention weights of linear mechanisms with 16 features on 96 tokens."""
    query, key = normals(8)(2, 1, 96, 16)
    names = ("linear-identity", "linear-elu1", "linear-exp", "linear-relu")
    for name, is_causal in itertools.product(names, (False, True)):
        weights = Candidate(name, name).weights(query, key, is_causal=is_causal)[0]
        row = {"mechanism": name, "causal": is_causal, "length": 96, "features": 16}
        row |= {"rank": int(torch.linalg.matrix_rank(weights, rtol=1e-12))}
        row |= {"zero_diagonal": int((weights.diagonal() == 0).sum())}
        yield row | {"effective_rank": float(measure.effective_rank(weights))}


@SECTION.fact(0.5, name="linear features")
def features() -> RowIterator:
    """Compare q . k of 200,000 non-negative keys with the general and the independent closed form."""
    uniform = partial(torch.rand, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for width in (4, 16, 64):
        q, independent = uniform(width), uniform(200_000, width).square()
        mixed = independent @ uniform(width, width)
        general = theory.linear_sparsity(q, mixed.mean(0), torch.cov(mixed.T))
        # u^2 of a uniform u has mean 1/3 and variance 4/45
        iid = theory.iid_linear_sparsity(q, 1 / 3, math.sqrt(4 / 45))
        for kind, keys, predicted in (("general", mixed, general), ("independent", independent, iid)):
            row = {"kind": kind, "width": width, "measured": float(measure.sparsity(keys @ q))}
            yield row | {"theory": float(predicted)}


@SECTION.fact(0.3)
def sparse_features() -> RowIterator:
    """Compute S of q . k for features that are nearly always 0: exp of normal numbers of growing spread."""
    for spread in (0.5, 1.0, 2.0, 3.0, 4.0):
        q = torch.rand(16, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
        # exp(N(0, s^2)) has the mean exp(s^2/2) and the variance (exp(s^2) - 1) exp(s^2).
        mean, deviation = math.exp(spread**2 / 2), math.sqrt(math.expm1(spread**2)) * math.exp(spread**2 / 2)
        yield {"spread": spread, "S": float(theory.iid_linear_sparsity(q, mean, deviation))}


@SECTION.fact(0.1)
def feature_bits() -> RowIterator:
    """Measure what features of falling signal-to-noise ratio (mean over deviation) can express.

    It is the entropy, in bits, of 200,000 features in 256 equal steps between the smallest and the largest.
    Non-negative features are exp of normal numbers of growing spread; the signed control has the same ratios.
    """
    normal = normals(11)(200_000)
    for spread in (0.25, 0.5, 1.0, 2.0, 3.0):
        snr = 1 / math.sqrt(math.expm1(spread**2))  # of exp(N(0, spread^2))
        for kind, x in (("non-negative", (spread * normal).exp()), ("signed", normal + snr)):
            steps = ((x - x.min()) / (x.max() - x.min()) * 255).long()
            share = steps.bincount(minlength=256) / len(x)
            yield {"kind": kind, "snr": snr, "bits": float(torch.special.entr(share).sum() / math.log(2))}


@SECTION.fact(0.1)
def decay() -> RowIterator:
    """Measure S of the last row of the mechanism decay beside its closed form and its upper bound."""
    for start, length in itertools.product((0.5, 0.9, 0.99, 0.999), (2, 16, 64, 256, 1024)):
        zero = torch.zeros(1, length, 16, dtype=torch.float64)
        weights = Candidate("decay", f"decay({start})").weights(zero[:, :1], zero)[0, 0]
        rate = min(float(weights[-2] / weights[-1]), 1.0)
        row = {"decay": rate, "length": length, "measured": float(measure.sparsity(weights))}
        row |= {"theory": float(theory.decay_sparsity(length, rate))}
        yield row | {"bound": float(theory.decay_bound(length, rate))}


@SECTION.definition(SU, "S of linear attention with non-negative features, from mean and covariance.")
def _general_linear(results: Results) -> Finding:
    """Measured and formula agree to 0.002; the same moments stand on both sides."""
    return _closed_form(results, "general")


@SECTION.theorem(SU, "The same with independent features.")
def _iid_linear(results: Results) -> Finding:
    """200,000 keys and formula agree to 0.002 for widths 4, 16 and 64."""
    return _closed_form(results, "independent")


def _closed_form(results: Results, kind: str) -> Finding:
    rows = results.rows("linear features", kind=kind)
    error = max(abs(row["measured"] - row["theory"]) for row in rows)
    return grade(error < 2e-3), f"largest distance over {len(rows)} widths and 200,000 keys each: {error:.1g}"


@SECTION.theorem(
    SU,
    "Non-negative linear attention can be arbitrarily sparse if features have a low mean against their"
    " spread.",
)
def _sparse_features(results: Results) -> Finding:
    """S falls with every step of the spread, and below 0.01 in the end; partly if it only falls."""
    rows = results.rows("sparse features")
    falls = all(a["S"] > b["S"] for a, b in itertools.pairwise(rows))
    return grade(falls and rows[-1]["S"] < 0.01, falls), (
        f"S falls from {rows[0]['S']:.3f} to {rows[-1]['S']:.1g} as the features' spread grows from"
        f" {rows[0]['spread']:g} to {rows[-1]['spread']:g}"
    )


@SECTION.experiment(SU, "Non-negative features of low signal-to-noise ratio carry little information.")
def _low_snr(results: Results) -> Finding:
    """Bits per feature fall with the ratio, at the smallest to less than a half of those at the largest, and
    signed features of the same ratios keep at least 90 % of theirs; partly if only the first. Refuted: Bits
    of non-negative features do not fall with the ratio.
    """
    own, signed = (
        [row["bits"] for row in results.rows("feature bits", kind=kind)]
        for kind in ("non-negative", "signed")
    )
    ratios = [row["snr"] for row in results.rows("feature bits", kind="signed")]
    falls = all(a > b for a, b in itertools.pairwise(own)) and own[-1] < own[0] / 2
    return grade(falls and min(signed) >= 0.9 * max(signed), falls), (
        f"as mean over deviation falls from {ratios[0]:.2g} to {ratios[-1]:.2g}, non-negative features go"
        f" from {own[0]:.1f} to {own[-1]:.2g} bits each, signed ones from {signed[0]:.1f} to {signed[-1]:.1f}"
    )


@SECTION.theorem(SU, "‖q‖₂/‖q‖₁ has the maximum √d.")
def _norm_ratio(results: Results) -> Finding:
    """The largest ratio found lies within 10 % of √d for d = 2 to 256."""
    rows = results.rows("norm ratios")
    largest = [row["largest"] for row in rows]
    last = rows[-1]
    return grade(all(abs(row["largest"] - row["sqrt"]) < 0.1 * row["sqrt"] for row in rows)), (
        f"the largest found is {min(largest):.4f} to {max(largest):.4f} in dimensions up to"
        f" {last['width']}, where √d is {last['sqrt']:.0f}"
    )


@SECTION.theorem(SU, "Causal linear attention has full rank, so low rank does not explain its weakness.")
def _causal_rank(results: Results) -> Finding:
    """A triangle has full rank if its diagonal has no zero: supported if none of four mechanisms has one on
    96 tokens with 16 features; partly if some have none.
    """
    # Small entries on the diagonal do not lower the exact rank, so the numeric rank is not used.
    causal, bidirectional = (results.rows("causal ranks", causal=x) for x in (True, False))
    full = [row for row in causal if not row["zero_diagonal"]]
    lost = [f"{row['mechanism']} ({row['zero_diagonal']} zeros)" for row in causal if row["zero_diagonal"]]
    low = max(row["rank"] for row in bidirectional)
    effective = ", ".join(f"{row['mechanism']} {row['effective_rank']:.0f}" for row in causal)
    return grade(not lost, bool(full)), (
        f"no zero on the diagonal of {len(full)} of {len(causal)} triangles of {causal[0]['length']} tokens"
        + (f", zeros in {', '.join(lost)}" if lost else "")
        + f"; without the mask the rank is at most {low}. Effective ranks of the triangles: {effective}"
    )


@SECTION.theorem(SU, "The closed form of S for decay; it tends to 0 as rows get longer.")
def _decay(results: Results) -> Finding:
    """Measured and formula agree to 1e-6; with decay 0.9 S falls to a third from 16 to 1024 keys."""
    rows = results.rows("decay")
    error = max(abs(row["measured"] - row["theory"]) for row in rows)
    first, last = (
        next(row["measured"] for row in rows if row["length"] == n and abs(row["decay"] - 0.9) < 0.01)
        for n in (16, 1024)
    )
    return grade(error < 1e-6 and last < first / 3), (
        f"largest distance {error:.1g}; with decay 0.9 S goes from {first:.3f} to {last:.3f} as rows get"
        " longer"
    )


@SECTION.theorem(SU, "S of decay has an upper bound that falls like 1/√n.")
def _decay_bound(results: Results) -> Finding:
    """S ≤ √((1 + λ)/(n (1 − λ)(1 + λⁿ))), to 1e-9, for four λ from 0.5 to 0.999 and five n from 2 to 1024,
    and some row comes within 1 % of the bound, so that no smaller one would do.
    """
    rows = results.rows("decay")
    over = [row["measured"] / row["bound"] for row in rows]
    loosest = max(math.sqrt(1 + row["decay"] ** row["length"]) for row in rows)
    near = max(over)
    return grade(near <= 1 + 1e-9 and near > 0.99), (
        f"S is {min(over):.3f} to {near:.6f} of the bound √((1 + λ)/(n (1 − λ)(1 + λⁿ))) in {len(rows)} rows;"
        f" without 1 + λⁿ the bound would be up to {loosest:.2f} times as large"
    )
