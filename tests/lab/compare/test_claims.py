"""Claims: kinds, rules, verdicts that follow the measurements, and none without one."""

import copy

import pytest

from tests.lab.compare.tiny import record_of
from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Results
from unsoft.lab.compare.output import conclusions
from unsoft.lab.compare.plan import sections
from unsoft.lab.compare.section import COUNTED, DEFINITION, EXPERIMENT, KINDS, TRAINED, Claim
from unsoft.lab.evidence import VERDICTS

CLAIMS = {claim.name: claim for section in sections() for claim in section.claims}
DEFINITIONS = {
    "forced-sum",
    "cog-sums",
    "affine",
    "deletion",
    "general-linear",
    "hijacking",
    "wasted-capacity",
    "identity-even",
    "vanishing-gradient",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    wanted = ["focus", "hijack", "sign", "claims", "solver"]
    return record_of([Candidate("softmax", "softmax")], tmp_path_factory.mktemp("store"), wanted)


def judged(name, answers):
    """The verdict of one claim on rows written by hand: {(measurement, mechanism): rows}."""
    kept = [{"name": n, "mechanism": m, "rows": rows, "problem": ""} for (n, m), rows in answers.items()]
    return CLAIMS[name].judge(Results({"subjects": [], "answers": kept}))


def verdicts(record):
    return {claim["name"]: claim["verdict"] for claim in conclusions(Results(record), "tiny")["claims"]}


def test_names_are_unique_and_kinds_are_known():
    names = [claim.name for section in sections() for claim in section.claims]
    assert len(names) == len(set(names)) and {claim.kind for claim in CLAIMS.values()} <= set(KINDS)
    assert {claim.name for claim in CLAIMS.values() if claim.kind == DEFINITION} == DEFINITIONS


def test_every_experiment_says_beforehand_what_would_refute_it():
    for claim in CLAIMS.values():
        assert claim.counts == (claim.kind in COUNTED)
        if claim.kind in (EXPERIMENT, TRAINED):
            assert claim.rule and claim.refuted, claim.name
    for rule, missing in (("a rule", "refute"), ("", "rule")):
        with pytest.raises(ValueError, match=missing):
            Claim("x", "nobody 2026", "x", EXPERIMENT, rule, "", lambda results: ("supported", ""))


def test_definitions_are_shown_and_never_counted(measured):
    found = {claim["name"]: claim for claim in conclusions(Results(measured), "tiny")["claims"]}
    for name in DEFINITIONS:
        assert found[name]["verdict"] == "by construction" and not found[name]["counts"], name


def test_without_measurements_nothing_is_judged(measured):
    found = conclusions(Results(measured | {"answers": []}), "tiny")["claims"]
    assert {claim["verdict"] for claim in found} <= {"not run", "not testable here"}
    assert all(claim["found"] for claim in found)


def test_what_mathematics_decides(measured):
    found = verdicts(measured)
    assert set(found.values()) <= set(VERDICTS)
    for name in (
        "decay",
        "decay-bound",
        "example",
        "clones-share",
        "isolated",
        "additive",
        "three-keys",
        "radius",
    ):
        assert found[name] == "supported", name
    for name in ("invertible", "cubic-collapse", "sparse-features", "iid-linear", "relu2-beta"):
        assert found[name] == "supported", name
    for name in ("exp", "relu2", "performer-limit", "redundancy", "edges"):
        assert found[name] == "supported", name
    for name in ("norm-ratio", "few-steps"):
        assert found[name] == "not supported", name


def opposition_rows(d):
    return [
        {"kind": "pair", "first": a, "second": b, "block": k, "d": d + 1e-3 * k}
        for a, b in ((0.0, -4.0), (0.0, -8.0), (-2.0, -8.0))
        for k in range(4)
    ]


def learning_rows(steps):
    return [{"draw": k, "rate": 1.0, "steps": steps + k % 2} for k in range(4)]


def stride_rows(*steps):
    """Steps for the strides 8, 4, 2 and 1."""
    return [
        {"stride": stride} | row
        for stride, x in zip((8.0, 4.0, 2.0, 1.0), steps, strict=True)
        for row in learning_rows(x)
    ]


def deletion_rows(removed, dynamic):
    return [{"draw": k, "removed": removed + 1e-4 * k, "negative": 0.0, "dynamic": dynamic} for k in range(4)]


def stack_rows(decoded, rank=0.9, alike=0.5):
    return [
        {
            "skip": skip,
            "seed": seed,
            "depth": depth,
            "rank": rank if depth else 1.0,
            "moved": 0.5 if depth else 0.0,
            "decoded": (decoded + 1e-3 * seed) if depth else 1.0,
            "recovery": 1.0,
            "alike": alike * depth / 2,
        }
        for skip in (False, True)
        for seed in range(3)
        for depth in range(3)
    ]


def noise_of(ratio):
    return [
        {"mechanism": name, "mean": mean, "draw": k, "noise": x * (1 + 1e-3 * k)}
        for mean in (0.0, -2.0, -4.0, -6.0, -8.0)
        for name, x in (("softmax", ratio), ("softmax1", 1.0))
        for k in range(3)
    ]


def signed_of(relu, leaky, plain):
    return [
        {"score": score, "divided by": norm, "draw": k, "explained": x + 1e-4 * k}
        for norm in ("the sum", "the sum of sizes")
        for score, x in (("ReLU", relu), ("LeakyReLU", leaky), ("identity", plain))
        for k in range(3)
    ]


def residual_of(factor, power=3):
    return [
        {
            "mechanism": name,
            "size": size,
            "draw": k,
            "before": size,
            "after": f * size**power * (1 + 1e-3 * k),
        }
        for size in (1.0, 0.1, 0.01, 0.001)
        for name, f in (("softmax", 1.0), ("gpam", factor))
        for k in range(3)
    ]


def features_of(sign, both=0.0):
    from unsoft.lab.compare.sections.features import FEATURES, FORMULAS

    return [
        {
            "formula": name,
            "draw": k,
            "accuracy": 0.5 + sign * has[0] + both * has[0] * has[1] + 0.01 * has[1] + 1e-4 * k,
        }
        | dict(zip(FEATURES, has, strict=True))
        for name, (has, _) in FORMULAS.items()
        for k in range(3)
    ]


def gate_rows(*counts, gate=0.01):
    """What 50 clones count as in each of the five cases, and 1000 in the first four."""
    from unsoft.lab.compare.sections.gating import CASES

    rows = [{"case": case, "clones": 50, "count": x} for case, x in zip(CASES, counts, strict=True)]
    rows += [{"case": case, "clones": 1000, "count": x} for case, x in zip(CASES[:4], counts, strict=False)]
    gates = {
        "under": "magnitude",
        "beta": 1.0,
        "gamma": 0.0,
        "t": 1.0,
        "clone_gate": gate,
        "unique_gate": 0.9,
    }
    return [row | gates for row in rows]


def hidden_rows(start, fitted, mass=0.5):
    """The share of a crowd in the hidden state, with the gate on values at initialisation and fitted."""
    from unsoft.lab.compare.sections.gating import _LOGITS, FITTED, START

    return [
        {"gate": kind, "where": where, "crowd": crowd, "share": share, "unique": 0.3}
        for kind, values in ((START, start), (FITTED, fitted))
        for where, share in (("values", values), ("mass", mass))
        for crowd in _LOGITS
    ]


def heads_rows(random, trained):
    """How alike heads are in the last layer of random networks, and of two trained models."""
    return {
        ("heads with independent maps", ""): [
            {"seed": k, "depth": depth, "alike": (random if depth == 2 else 0.5) + 1e-4 * k}
            for k in range(3)
            for depth in (1, 2)
        ],
        ("collapse", "softmax"): stack_rows(0.5, alike=0.95),
        ("heads of trained models", ""): [
            {"model": model, "trained": True, "first": [0.5, 0.51], "last": [trained, trained + 1e-4]}
            for model in ("one", "two")
        ],
    }


def price_rows(power, training=1.5, memory=1.5):
    return {
        ("price of the solver", ""): [
            {"length": n, "solve": float(n**power), "attention": float(n**2), "ratio": 0.5}
            for n in (1024, 4096)
        ],
        ("training at 512", ""): [{"mechanism": "magnitude", "length": 512, "ratio": training}],
        ("memory", ""): [{"mechanism": "magnitude", "length": n, "ratio": memory} for n in (128, 512)],
    }


def taylor_rows(*errors):
    return {
        ("Taylor features", ""): [
            {"degree": 2 + k, "features": 10, "error": error} for k, error in enumerate(errors)
        ],
        ("random features", ""): [
            {"features": f, "size": size, "draw": k, "error": f**-0.5}
            for f in (16, 64, 256, 1024)
            for size in (0.25, 1.0)
            for k in range(2)
        ],
    }


def cloud_rows(wide, flat=0.0, field="density"):
    return {
        ("clouds", ""): [
            {"draw": k, "width": width, "eps": eps, "density": 0.0, "edge": 0.0} | {field: x + 1e-3 * k}
            for width, eps, x in ((64, 0.1, wide), (2, 0.1, flat), (2, 1e-6, flat))
            for k in range(3)
        ]
    }


def diversity_rows(*diversities):
    """Sets of width 64 with magnitude 3, and one of width 2 where both are equal."""
    sets = [(64, x) for x in diversities] + [(2, 3.0)]
    return {
        ("diversity", ""): [
            {"width": width, "draw": k, "spread": 1.0, "magnitude": 3.0, "diversity": x, "negative": 0}
            for k, (width, x) in enumerate(sets)
        ]
    }


def stability_rows(*changes, largest=0.5):
    """Changes for keys 0.001, 0.01 and 0.1 apart."""
    return {
        ("stability", ""): [
            {"eps": 0.0, "apart": apart, "status": "ok", "change": x, "largest": largest}
            for apart, x in zip((1e-3, 1e-2, 1e-1), changes, strict=True)
        ]
    }


def column_rows(*same):
    """How often two queries of each kind share their heaviest key under linear attention."""
    from unsoft.lab.compare.sections.queries import QUERIES

    return {
        ("columns", ""): [
            {"mechanism": m, "queries": kind, "spread": s, "draw": k, "S": 1 / (1 + s)}
            | {"same": (x if m == "linear" else 0.05) + 1e-3 * k}
            for kind, x in zip(QUERIES, same, strict=True)
            for m in ("linear", "softmax")
            for s in (0.5, 1.0, 2.0, 4.0)
            for k in range(3)
        ]
    }


def finite_rows(*factors):
    """Measured S of softmax and relu² over that of the formula, one factor for each point."""
    return {
        ("focus", name): [
            {"kind": kind, "beta": 0.0, "gamma": 1.0 + k, "S": 0.5 * (x if kind == "measured" else 1.0)}
            for k, x in enumerate(factors)
            for kind in ("theory", "measured")
        ]
        for name in ("softmax", "relu2")
    }


def queries_of(linear, wide=None):
    return [
        {"mechanism": name, "width": width, "draw": k, "S": s + 1e-4 * k}
        for name, by_width in (
            ("softmax", (0.06, 0.06, 0.06)),
            *((n, (linear, linear, wide or linear)) for n in ("linear-relu", "linear-elu1")),
        )
        for width, s in zip((4, 16, 64), by_width, strict=True)
        for k in range(3)
    ]


def solver_rows(weights):
    return {
        (f"solver, {kind}", ""): [
            {"keys": kind, "eps": 0.1, "steps": steps, "weights": weights, "total": weights, "gate": weights}
            for steps in (3, 5)
        ]
        for kind in ("distinct keys", "crowds, nearly coinciding")
    }


FLIPS = {
    "erased-differences": (
        {("opposition", "softmax"): opposition_rows(0.05), ("opposition", "cog"): opposition_rows(1.5)},
        {("opposition", "softmax"): opposition_rows(0.5), ("opposition", "cog"): opposition_rows(1.5)},
    ),
    "influence-factors": (
        {
            ("opposition", n): opposition_rows(d)
            for n, d in (("softmax", 0.05), ("softmax1", 0.5), ("sinh", 0.5))
        },
        {("opposition", n): opposition_rows(0.05) for n in ("softmax", "softmax1", "sinh")},
    ),
    "softmax-only-adds": (
        {("deletion", "softmax"): deletion_rows(0.0, 0.0)},
        {("deletion", "softmax"): deletion_rows(0.5, 0.3)},
    ),
    "dynamic-deletion": (
        {("deletion", "softmax"): deletion_rows(0.5, 0.0), ("deletion", "cog"): deletion_rows(0.5, 0.9)},
        {("deletion", "softmax"): deletion_rows(0.5, 0.2), ("deletion", "cog"): deletion_rows(0.5, 0.1)},
    ),
    "hard-to-learn": (
        {
            ("learning by stride", "softmax"): stride_rows(40, 40, 40, 40),
            ("learning by stride", "cog"): stride_rows(2, 2, 2, 2),
        },
        {
            ("learning by stride", "softmax"): stride_rows(40, 40, 40, 4),
            ("learning by stride", "cog"): stride_rows(2, 2, 2, 4),
        },
    ),
    "gpam-gradient": (
        {("learning", "softmax"): learning_rows(40), ("learning", "gpam"): learning_rows(2)},
        {("learning", "softmax"): learning_rows(4), ("learning", "gpam"): learning_rows(40)},
    ),
    "sign-decides": ({("features", ""): features_of(0.2)}, {("features", ""): features_of(-0.2)}),
    "forced-noise": ({("forced mass", ""): noise_of(3.0)}, {("forced mass", ""): noise_of(1.0)}),
    "non-negativity": (
        {("signed scores", ""): signed_of(0.4, 0.2, 0.1)},
        {("signed scores", ""): signed_of(0.4, 0.4, 0.5)},
    ),
    "cog-robust": (
        {
            ("collapse", "cog"): stack_rows(0.9),
            ("collapse", "softmax"): stack_rows(0.3),
            ("collapse of noise", ""): stack_rows(0.1),
        },
        {
            ("collapse", "cog"): stack_rows(0.3),
            ("collapse", "softmax"): stack_rows(0.9),
            ("collapse of noise", ""): stack_rows(0.1),
        },
    ),
    "head-collapse": (heads_rows(0.95, 0.95), heads_rows(0.6, 0.6)),
    "slower-collapse": ({("residual", ""): residual_of(1.8)}, {("residual", ""): residual_of(1.0)}),
    "cubic-collapse": ({("residual", ""): residual_of(1.8)}, {("residual", ""): residual_of(1.8, power=2)}),
    "gate": (
        {("gates", ""): gate_rows(1.2, 1.2, 1.2, 1.5, 0.6)},
        {("gates", ""): gate_rows(30.0, 5.0, 5.0, 30.0, 49.0)},
    ),
    "one-unit": (
        {("gates", ""): gate_rows(1.05, 1.05, 1.05, 1.05, 0.95)},
        {("gates", ""): gate_rows(30.0, 5.0, 5.0, 30.0, 49.0)},
    ),
    "gates-shrink": (
        {("gates", ""): gate_rows(1, 1, 1, 1, 1, gate=0.01)},
        {("gates", ""): gate_rows(1, 1, 1, 1, 1, gate=0.5)},
    ),
    "values-or-mass": (
        {("hidden state", ""): hidden_rows(0.04, 0.01)},
        {("hidden state", ""): hidden_rows(0.04, 0.03, mass=0.02)},
    ),
    "finite-rows": (finite_rows(1.0, 1.02, 0.98), finite_rows(1.0, 1.1, 1.1)),
    "linear-flat": ({("best queries", ""): queries_of(0.5)}, {("best queries", ""): queries_of(0.07)}),
    "dimensions": (
        {("best queries", ""): queries_of(0.5, 0.2)},
        {("best queries", ""): queries_of(0.5, 0.8)},
    ),
    "key-bias": tuple(
        {
            ("bias of keys", ""): [
                {"common": c, "length": x, "draw": k, "S": s + 1e-4 * k, "empty": 0.0}
                for c in (0.0, 1.0)
                for x, s in ((0.0, 0.4), (4.0, best))
                for k in range(3)
            ]
        }
        for best in (0.1, 0.39)
    ),
    "low-snr": tuple(
        {
            ("feature bits", ""): [
                {"kind": kind, "snr": snr, "bits": bits if kind == "non-negative" else 6.8}
                for snr, bits in zip((4.0, 0.5, 0.01), measured, strict=True)
                for kind in ("non-negative", "signed")
            ]
        }
        for measured in ((6.6, 3.0, 0.1), (6.6, 6.6, 6.7))
    ),
    "absolute-positions": (column_rows(0.8, 0.8, 0.8), column_rows(0.02, 0.02, 0.4)),
    "decay-far": tuple(
        {
            ("needle far away", ""): [
                {"mechanism": m, "distance": d, "draw": k, "advantage": 7.0 if m == "softmax" else far}
                for m in ("softmax", "retention", "decay(0.9)")
                for d in (1, 512)
                for k in range(2)
            ]
        }
        for far in (None, 20.0)
    ),
    "few-steps": (solver_rows(0.001), solver_rows(0.5)),
    "steady": (stability_rows(1e-4, 1e-4, 1e-4), stability_rows(1e-4, 1e-4, 1e-4, largest=131.0)),
    "tikhonov": tuple(
        {
            ("stability", ""): [
                {"eps": e, "apart": 1e-3, "status": "ok", "change": c, "largest": 2.0}
                for e, c in ((0.0, 0.7), (0.01, ridge))
            ]
        }
        for ridge in (1e-5, 0.5)
    ),
    "calm-gradients": tuple(
        {("slopes of weights", ""): [{"eps": 1e-6, "largest": 1000.0}, {"eps": 0.1, "largest": x}]}
        for x in (0.2, 900.0)
    ),
    "redundancy": (cloud_rows(-0.8), cloud_rows(0.1, flat=-0.8)),
    "edges": (cloud_rows(0.8, field="edge"), cloud_rows(-0.1, flat=0.8, field="edge")),
    "bound": (diversity_rows(3.0, 3.0, 3.0), diversity_rows(3.0, 2.0, 2.0)),
    "price": (price_rows(2.0), price_rows(3.0)),
    "entropy-invariance": tuple(
        {
            ("entropy by length", ""): [
                {
                    "mechanism": m,
                    "length": n,
                    "draw": k,
                    "entropy": (1 if m == "softmax" else rise) * n / 1000,
                }
                for m in ("softmax", "logn+softmax")
                for n in (64, 256, 1024, 4096)
                for k in range(3)
            ]
        }
        for rise in (0.0, 1.0)
    ),
    "cosformer-local": tuple(
        {
            ("locality", ""): [
                {"mechanism": m, "draw": k, "distance": (40.0 if m == "linear-relu" else d) + 1e-3 * k}
                for m in ("linear-relu", "cosformer")
                for k in range(3)
            ]
        }
        for d in (20.0, 45.0)
    ),
    "performer-limit": (taylor_rows(0.4, 1e-7, 1e-16), taylor_rows(0.4, 0.4, 0.5)),
}


@pytest.mark.parametrize("name", FLIPS)
def test_results_that_flip_the_verdict(name):
    good, bad = FLIPS[name]
    first, second = judged(name, good), judged(name, bad)
    assert (first[0], second[0]) == ("supported", "not supported"), (first, second)
    assert first[1] != second[1], "the words follow the numbers"


PARTLY = {
    "one case of five": ("one-unit", {("gates", ""): gate_rows(35.4, 1.63, 4.75, 34.8, 49.1)}),
    "1000 clones": ("gate", {("gates", ""): gate_rows(1.0, 1.0, 26.9, 1.0, 1.0)}),
    "fitted only": ("values-or-mass", {("hidden state", ""): hidden_rows(0.4, 0.01)}),
    "four times at one stride only": (
        "hard-to-learn",
        {
            ("learning by stride", "softmax"): stride_rows(40, 8, 8, 8),
            ("learning by stride", "cog"): stride_rows(2, 4, 4, 4),
        },
    ),
    "the interaction is larger": ("sign-decides", {("features", ""): features_of(0.1, both=0.2)}),
    "random networks only": ("head-collapse", heads_rows(0.95, 0.6)),
    "one kind of queries": ("absolute-positions", column_rows(0.8, 0.2, 0.2)),
    "memory": ("price", price_rows(2.0, memory=5.0)),
    "most sets of width 64": ("bound", diversity_rows(3.0, 3.0, 2.0)),
    "two distances of three": ("steady", stability_rows(0.5, 1e-4, 1e-4)),
    "most rows": ("finite-rows", finite_rows(1.0, 1.0, 1.1)),
    "the error only falls": ("performer-limit", taylor_rows(0.4, 0.1, 1e-3)),
}


@pytest.mark.parametrize("case", PARTLY)
def test_results_between_yes_and_no(case):
    name, answers = PARTLY[case]
    verdict, numbers = judged(name, answers)
    assert verdict == "partly supported", numbers


def test_a_solver_whose_overhead_dominates_is_undecided():
    assert judged("price", price_rows(1.2))[0] == "undecided"


def test_magnitude_below_the_largest_diversity_refutes_the_bound():
    assert judged("bound", diversity_rows(3.0, 3.0, 3.0, 3.5))[0] == "not supported"


def test_every_experiment_is_flipped():
    experiments = {claim.name for claim in CLAIMS.values() if claim.kind == EXPERIMENT}
    assert experiments <= set(FLIPS)


@pytest.mark.parametrize(
    "claim, name, mechanism, change",
    [
        ("cog-sums", "sums", "cog", lambda row: row.update(l1_high=1.1)),
        ("example", "example", "", lambda row: row.update(share=0.3)),
        ("additive", "magnitude of sets", "", lambda row: row.update(found=row["found"] + 1)),
        ("clones-share", "magnitude of sets", "", lambda row: row.update(off=0.1)),
        ("exp", "focus", "softmax", lambda row: row["kind"] == "theory" and row.update(S=1.001 * row["S"])),
        ("relu2", "focus", "relu2", lambda row: row["kind"] == "theory" and row.update(S=1.001 * row["S"])),
        ("invertible", "pivots", "", lambda row: row.update(positive=False)),
        ("identity-even", "focus", "identity", lambda row: row.update(S=row["S"] + 0.1 * row["beta"])),
        ("decay", "decay", "", lambda row: row.update(measured=1.0)),
        ("decay-bound", "decay", "", lambda row: row.update(bound=0.0001)),
        ("causal-rank", "causal ranks", "", lambda row: row.update(zero_diagonal=1)),
        ("vanishing-gradient", "negative logits", "", lambda row: row.update(gradient=1.0)),
    ],
)
def test_another_measurement_is_another_verdict(measured, claim, name, mechanism, change):
    copied = copy.deepcopy(measured)
    (answer,) = (a for a in copied["answers"] if (a["name"], a["mechanism"]) == (name, mechanism))
    for row in answer["rows"]:
        change(row)
    assert verdicts(copied)[claim] == "not supported" != verdicts(measured)[claim]


def test_norms_would_hold_if_the_numbers_were_so(measured):
    copied = copy.deepcopy(measured)
    for answer in copied["answers"]:
        if answer["name"] == "norm ratios":
            for row in answer["rows"]:
                row["largest"] = row["sqrt"]
    assert verdicts(copied)["norm-ratio"] == "supported"
