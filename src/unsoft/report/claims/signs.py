"""Document 000: signs, sums, deletion, collapse, and the case for non-negative weights."""

from __future__ import annotations

from unsoft.report.claims.claim import HOLDS, LIMITS, Claim, Finding, grade
from unsoft.report.results import Missing, Results

_DOCUMENT = "000"


def vanishing_gradient(results: Results) -> Finding:
    rows = results.rows("negative logits")
    slope = {(row["mechanism"], row["logit"]): row["gradient"] for row in rows}
    lost = slope["softmax", -10.0] / slope["softmax", 0.0]
    rate = slope["softmax", -8.0] / slope["softmax", -10.0]
    cog = slope["cog", -4.0] / slope["softmax", -4.0]
    return grade(lost < 1e-3), (
        f"softmax's slope at logit -10 is {lost:.1g} of that at 0 and falls by {rate:.2f} for each 2 (e² = 7.39); "
        f"at -4 cog's is {cog:.0f} times as large"
    )


def erased_differences(results: Results) -> Finding:
    softmax, cog = (results.rows("opposed", name)[0] for name in ("softmax", "cog"))
    erased = softmax["auc"] < 0.6
    return grade(erased, softmax["gap"] < cog["gap"] / 2), (
        f"softmax keeps the order (auc {softmax['auc']:.3f}) but can take away only {softmax['gap']:.2f} fair shares; "
        f"cog takes {cog['gap']:.1f}"
    )


def forced_sum(results: Results) -> Finding:
    row = results.rows("sums", "softmax")[0]
    return grade(abs(row["sum_low"] - 1) < 1e-6 and abs(row["sum_high"] - 1) < 1e-6), (
        f"row sums of softmax between {row['sum_low']:.6f} and {row['sum_high']:.6f}"
    )


def cog_sums(results: Results) -> Finding:
    row = results.rows("sums", "cog")[0]
    unit = abs(row["l1_low"] - 1) < 1e-6 and abs(row["l1_high"] - 1) < 1e-6
    free = row["sum_low"] < -0.1 and row["sum_high"] > 0.1
    return grade(unit and free, unit), (
        f"sum of sizes {row['l1_low']:.6f} to {row['l1_high']:.6f}; row sum {row['sum_low']:.2f} to {row['sum_high']:.2f}"
    )


def deletion(results: Results) -> Finding:
    cog, softmax = results.rows("sums", "cog")[0], results.rows("sums", "softmax")[0]
    return grade(cog["deletion"] > 0.1 and softmax["deletion"] == 0), (
        f"{cog['deletion']:.0%} of what cog moves along the sources' own directions is removed, {softmax['deletion']:.0%} for softmax "
        "(without an output projection; what trained heads do is not run)"
    )


def affine(results: Results) -> Finding:
    row = results.rows("sums", "gpam")[0]
    fixed = abs(row["sum_low"] - row["sum_high"]) < 1e-6
    return grade(fixed and row["negative"] > 0), (
        f"gpam's rows sum to {row['sum_low']:.4f} to {row['sum_high']:.4f}, {row['negative']:.1%} of the weight is negative"
    )


def slower_collapse(results: Results) -> Finding:
    ratios = {}
    for skip in (False, True):
        softmax, gpam = (
            {row["depth"]: row["residual"] for row in results.rows("collapse", name) if row["skip"] is skip}
            for name in ("softmax", "gpam")
        )
        middle = max(softmax) // 2
        if not softmax[middle]:
            raise Missing("softmax collapsed before the middle layer")
        ratios[skip] = (middle, gpam[middle] / softmax[middle])
    slower = [ratio > 1.05 for _, ratio in ratios.values()]
    return grade(all(slower), any(slower)), (
        f"residual of gpam over softmax's after {ratios[False][0]} random layers: {ratios[False][1]:.2f} without, "
        f"{ratios[True][1]:.2f} with skip connections; both still go to 0 without"
    )


def non_negativity(results: Results) -> Finding:
    rows = {row["kind"]: row["largest"] for row in results.rows("sum normalised")}
    plain, sizes = rows["signed, divided by the sum"], rows["signed, divided by the sum of sizes"]
    verdict = LIMITS if plain > 10 and sizes <= 1 else HOLDS if sizes > 1 else "does not hold"
    return verdict, (
        f"signed weights over their plain sum, as cosFormer tried them, reach {plain:.0f}; over the sum of their sizes, as in cog, "
        f"at most {sizes:.2f}. The case holds for that normaliser; whether signs hurt a trained model is not run"
    )


_SIGN = "softmax cog gpam --only sign"
_FACTS = "--only claims"
CLAIMS = (
    Claim("vanishing-gradient", _DOCUMENT, "Softmax's gradient vanishes for strongly negative logits.", "sign", _FACTS, vanishing_gradient),
    Claim("erased-differences", _DOCUMENT, "Softmax cannot tell weakly irrelevant from strongly opposed keys.", "sign", _SIGN, erased_differences),
    Claim("forced-sum", _DOCUMENT, "Softmax's weights must sum to 1, whatever the query is.", "sign", _SIGN, forced_sum),
    Claim("cog-sums", _DOCUMENT, "Cog's weights have L1 norm 1 and a free row sum.", "sign", _SIGN, cog_sums),
    Claim("deletion", _DOCUMENT, "Softmax can only add; negative weights delete.", "sign", _SIGN, deletion),
    Claim("affine", _DOCUMENT, "GPAM is an affine combination: fixed sum, entries below 0.", "sign", _SIGN, affine),
    Claim("slower-collapse", _DOCUMENT, "GPAM's representations collapse more slowly than softmax's.", "collapse",
          "softmax gpam --only collapse", slower_collapse),
    Claim("non-negativity", _DOCUMENT, "Weights should be non-negative: negative ones aggregate what is opposed and hurt (cosFormer).", "sign", _FACTS, non_negativity),
)  # fmt: skip
