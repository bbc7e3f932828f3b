"""Write docs/questions/*.md from a report of ``unsoft compare``.

``python docs/generate/questions.py [REPORT]``.

Without one the sections that the pages need are measured first, at the quick level: a minute or less. Results
of models are kept in docs/questions/models.json (experiments/real_models.py).

Chinese pages (*.zh-CN.md) are shorter: templates in questions.zh-CN, filled with the same numbers and rows.

Each page opens with an answer. Its numbers come from the record, its words were written for the verdicts in
``WRITTEN_FOR``: :func:`page` raises ValueError when a verdict has changed, so that no answer outlives its
evidence.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
from model_tables import (
    distances_of,
    heads_of,
    logits_of,
    mlp_counts,
    mlp_of,
    mlp_sentence,
    squashing_of,
    squashing_verdict,
    states_of,
    stored,
    table,
    trained_of,
)

from unsoft.lab.compare.jobs import Results
from unsoft.lab.compare.output import RECORD, read_record
from unsoft.lab.compare.sections import collapse, deletion, features, opposition
from unsoft.lab.evidence import Estimate, between, t_interval
from unsoft.lab.records import PACKAGED
from unsoft.lab.report.figure import Figure, svg_and_png
from unsoft.lab.study import read_records, summarise
from unsoft.lab.study.summary import ResultSummary

HERE = Path(__file__).parents[1] / "questions"
TEMPLATES = Path(__file__).with_name("questions.zh-CN")
SECTIONS = (
    *("opposition", "features", "deletion", "collapse", "irrelevance", "residual", "sign", "training"),
)
"""Sections that the pages need."""
SHOWN = ("softmax", "softmax1", "sigmoid", "relu2", "cog", "sinh", "identity", "gpam", "differential2")
"""Mechanisms in the first table of a page; the others are in a table that opens on demand."""
WRITTEN_FOR = {
    "irrelevant-or-opposed": {
        "erased-differences": "supported",
        "sign-decides": "partly supported",
        "trained-opposition": "supported",
    },
    "influence-factors": {
        "influence-factors": "partly supported",
        "forced-noise": "partly supported",
        "trained-influence": "undecided",
    },
    "deletion": {"softmax-only-adds": "partly supported", "dynamic-deletion": "supported"},
    "evolution-or-collapse": {"cog-robust": "not supported", "slower-collapse": "supported"},
}
"""For each page, the verdicts that its answer was written for."""
ATTENTION = (  # work, sign of weights, row sum, expected gain, reported result
    (
        "Cog, Lv et al. 2024, [arXiv 2411.07176](https://arxiv.org/abs/2411.07176)",
        *("signed", "free", "one head adds and deletes"),
        "withdrawn from ICLR 2026; +0.64 points at 141M parameters, one seed",
    ),
    (
        "GPAM, Heo and Choi 2024, [arXiv 2410.15578](https://arxiv.org/abs/2410.15578)",
        *("signed", "fixed", "slower collapse"),
        "perplexity 108.3 → 106.4 on PTB, no seeds reported",
    ),
    (
        "Differential Transformer, Ye et al. 2024, [arXiv 2410.05258](https://arxiv.org/abs/2410.05258)",
        *("signed", "1 − λ", "noise cancelled", "same quality with 65 % of the parameters"),
    ),
    (
        "Compositional De-Attention, Tay et al. 2019, NeurIPS",
        *("signed", "free", "add, subtract or nullify", "worse than softmax in GPAM's comparison"),
    ),
    (
        "Sigmoid attention, Ramapuram et al. 2024, [arXiv 2409.04431](https://arxiv.org/abs/2409.04431)",
        *("non-negative", "free", "no competition", "equal to softmax with a bias of −log n"),
    ),
    (
        "Softpick, Zuhri et al. 2025, [arXiv 2504.20966](https://arxiv.org/abs/2504.20966)",
        *("non-negative", "≤ 1", "no sink", "worse than softmax at 1.8B parameters"),
    ),
    (
        "Gated attention, Qiu et al. 2025, [arXiv 2505.06708](https://arxiv.org/abs/2505.06708)",
        *("non-negative", "free after the gate", "may write nothing", "used in Qwen3-Next"),
    ),
    (
        "DeltaNet, Yang et al. 2024, [arXiv 2406.06484](https://arxiv.org/abs/2406.06484)",
        *("signed", "free", "linear time, erases before it writes", "used in Qwen3-Next and Kimi Linear"),
    ),
)
BEYOND = (  # networks other than attention: work, what is signed, reported gain
    (
        "FAGCN, Bo et al. 2021, [arXiv 2101.00797](https://arxiv.org/abs/2101.00797)",
        "edge weights of a graph network, tanh instead of softmax",
        "keeps differences between neighbours; gains on graphs whose neighbours differ in class",
    ),
    (
        "GPR-GNN, Chien et al. 2021, [arXiv 2006.07988](https://arxiv.org/abs/2006.07988)",
        "weights of propagation steps",
        "negative weights turn a low-pass into a high-pass filter; against over-smoothing",
    ),
    (
        "Choi et al. 2023, [arXiv 2301.08918](https://arxiv.org/abs/2301.08918)",
        "message passing with negative edges",
        "shows where it hurts: with several classes opposed neighbours become less separable",
    ),
    (
        "Squared subtractive mixtures, Loconte et al. 2024,"
        " [arXiv 2310.00724](https://arxiv.org/abs/2310.00724)",
        "mixture weights of a density model",
        "can be exponentially smaller than mixtures that only add",
    ),
)
SIGNED_AND_FREE = {
    "softmax": ("no", "1"),
    "softmax1": ("no", "free"),
    "gated+softmax": ("no", "free after the gate"),
    "gpam": ("yes", "fixed"),
    "sinh": ("yes", "free"),
}
"""Features of the mechanisms of the study ``influence``."""
SIGNED_HEADS = (
    "Cog, Lv et al. 2024, [arXiv 2411.07176](https://arxiv.org/abs/2411.07176)",
    "attention weights",
    "one head gives positive, negative and near-zero weights to different tokens",
)
DELETION = (  # work, what was measured
    (
        "Wang et al. 2022, [arXiv 2211.00593](https://arxiv.org/abs/2211.00593)",
        "negative name mover heads of GPT-2 small write against the correct name",
    ),
    (
        "McDougall et al. 2023, [arXiv 2310.04625](https://arxiv.org/abs/2310.04625)",
        "copy suppression explains 76.9 % of the effect of head 10.7 of GPT-2 small",
    ),
    (
        "Janiak et al. 2023, [arXiv 2310.07325](https://arxiv.org/abs/2310.07325)",
        "memory management: heads of layer 2 of GELU-4L remove what one head of layer 0 wrote",
    ),
    (
        "McGrath et al. 2023, [arXiv 2307.15771](https://arxiv.org/abs/2307.15771)",
        "self-repair: later layers compensate for an ablated one, so ablation understates a head",
    ),
    (
        "Lv et al. 2024, [arXiv 2411.07176](https://arxiv.org/abs/2411.07176)",
        "deletion by the sign of the query-key product in a model trained with Cog",
    ),
)
COLLAPSE = (
    (
        "Dong et al. 2021, [arXiv 2103.03404](https://arxiv.org/abs/2103.03404)",
        "attention alone converges to rank one at a cubic rate; skip connections and MLPs stop it",
    ),
    (
        "Noci et al. 2022, [arXiv 2206.03126](https://arxiv.org/abs/2206.03126)",
        "rank collapse at initialisation makes the gradients of queries and keys vanish",
    ),
    (
        "Wu et al. 2024, [arXiv 2405.18781](https://arxiv.org/abs/2405.18781)",
        "masks slow the collapse; with LayerNorm, limits of any rank exist",
    ),
    (
        "Barbero et al. 2024, [arXiv 2406.04267](https://arxiv.org/abs/2406.04267)",
        "over-squashing: last-token representations of different sequences become equal",
    ),
    (
        "Belrose et al. 2023, [arXiv 2303.08112](https://arxiv.org/abs/2303.08112)",
        "the tuned lens decodes the next token from every layer, which our measure of the input does not",
    ),
)
CHINESE = {
    r"accuracy gained by each feature, the sign in rows that sum to 1: ": "各特征带来的准确率提升，"
    "符号的作用在行和为 1 时测量：",
    r"noise of softmax over that of softmax1, which differs in the forced sum alone: ": "softmax 与 softmax1"
    "（只差强制行和）的噪声之比，依 logit 均值：",
    r"([\d.]+) at mean (-?\d+)": r"\2 时 \1",
    r" \((\S+) to (\S+)\)": r"（\1 至 \2）",
    r" \(all equal\)": "（全部相等）",
    ", sum 1": "，行和为 1",
    "jump at 0": "0 处跳变",
    "zero width": "零区间",
    "free sum": "自由行和",
    r"\bsign\b": "符号",
    "not measured": "未测量",
    "partly supported": "部分成立",
    r"\| yes \|": "| 是 |",
    r"\| no \|": "| 否 |",
    r"\| free \|": "| 自由 |",
    r", (?=[^|]*$)": "，",
}
"""Patterns in numbers and rows, and their Chinese, in the order in which they are replaced."""
Rows = list[list[Any]]
Page = Callable[[dict[str, Any]], list[str]]


def main(report: Path | None) -> None:
    """Write all four pages, in English and Chinese."""
    if report is None:
        with tempfile.TemporaryDirectory() as folder:
            wanted = [word for name in SECTIONS for word in ("--only", name)]
            line = ["-m", "unsoft.cli", "compare", "--quick", *wanted, "--out", folder]
            subprocess.run([sys.executable, *line], check=True)
            main(Path(folder))
        return
    record = read_record(report / RECORD)
    HERE.mkdir(exist_ok=True)
    for name in FIGURES.values():
        if (source := report / "figures" / f"{name}.svg").exists():
            shutil.copyfile(source, HERE / f"{name}.svg")
    drawn = _deletion_figure(Results(record))
    (HERE / f"{drawn.name}.svg").write_bytes(svg_and_png(drawn.for_file())["svg"])
    for name in PAGES:
        (HERE / f"{name}.md").write_text(page(name, record))
        (HERE / f"{name}.zh-CN.md").write_text(chinese_page(name, record))


def page(name: str, record: dict[str, Any]) -> str:
    """Return one page: the answer, the figure, tables, literature and verdicts.

    Raises ValueError if a verdict is not the one that the answer was written for.
    """
    _check_verdicts(name, record)
    lines = PAGES[name](record)
    where = f"{record['machine']}, {record['written'][:10]}"
    lines += [
        "## How this page was made",
        "",
        f"By `python docs/generate/questions.py` from `{record['command'].partition(' --out ')[0]}`, {where}."
        " Confidence intervals are 95 %.",
    ]
    return "\n".join(lines) + "\n"


def chinese_page(name: str, record: dict[str, Any]) -> str:
    """Return one Chinese page: the answer, the figure and the main table.

    Raises ValueError as :func:`page` does.
    """
    _check_verdicts(name, record)
    numbers, rows = CONTENTS[name]
    template = (TEMPLATES / f"{name}.md").read_text()
    shown = [row for row in rows(record) if row[0].partition(",")[0] in SHOWN]
    lines = table((), shown)[2:-1]  # the template has the titles
    texts = {key: chinese(text) for key, text in (numbers(record) | {"rows": "\n".join(lines)}).items()}
    return template.format(**texts)


def chinese(text: str) -> str:
    """Return numbers with their words in Chinese."""
    for pattern, words in CHINESE.items():
        text = re.sub(pattern, words, text)
    return text


def _check_verdicts(name: str, record: dict[str, Any]) -> None:
    verdicts = {claim["name"]: claim["verdict"] for claim in record["claims"]}
    for claim, expected in WRITTEN_FOR[name].items():
        if verdicts.get(claim) != expected:
            raise ValueError(
                f"questions: the answer of {name!r} was written for claim {claim!r} being {expected!r}, but"
                f" the record says {verdicts.get(claim)!r}: rewrite the answer, its Chinese template and"
                " WRITTEN_FOR"
            )


def _head(title: str, asked: str, answer: str, name: str) -> list[str]:
    figure = FIGURES[name]
    return [
        *(f"# {title}", ""),
        *(f"*{asked}* (open question of the survey of negative attention, 2025)", ""),
        *(f"**Answer.** {' '.join(answer.split())}", ""),
        *(f"![{title}]({figure}.svg)", ""),
    ]


def _found(record: dict[str, Any], name: str) -> str:
    """Return the numbers of a claim as text."""
    return next(str(claim["found"]) for claim in record["claims"] if claim["name"] == name)


def _claims(record: dict[str, Any], *names: str) -> list[str]:
    """Return verdict, numbers and command of each claim."""
    lines = ["## Claims and verdicts", ""]
    for claim in record["claims"]:
        if claim["name"] in names:
            lines.append(f"- **{claim['text']}** {claim['verdict']} ({claim['kind']}). {claim['found']}.")
            if claim["command"]:
                lines.append(f"  `{claim['command']}`")
    return [*lines, ""]


def _by_mechanism(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a table of the mechanisms of ``SHOWN``, and one of the others that opens on demand."""
    others = [row for row in rows if row[0] not in SHOWN]
    lines = table(titles, [row for row in rows if row[0] in SHOWN])
    if others:
        summary = f"<details><summary>{len(others)} more mechanisms</summary>"
        lines += [summary, "", *table(titles, others), "</details>", ""]
    return lines


def _text(estimate: Estimate | None) -> str:
    return "" if estimate is None else str(estimate)


def _share(model: str) -> str:
    """Return the share of logits of a model that are negative."""
    return f"{stored()['signed-logits']['models'][model]['probes'][-1]['negative']:.0%}"


def _cost(model: str, change: str) -> str:
    """Return what a change of logits costs a model."""
    rows = stored()["signed-logits"]["models"][model]["interventions"]
    return str(t_interval(next(row["lost"] for row in rows if row["change"] == change)))


def _opposition_numbers(record: dict[str, Any]) -> dict[str, str]:
    return {
        **{label: _short(opposition.distance(Results(record), label)) for label in ("softmax", "cog")},
        "features": _found(record, "sign-decides"),
        "negative": _share("smollm2"),
        "equal": _cost("smollm2", "negative logits made equal"),
        "zero": _cost("smollm2", "negative logits set to 0"),
        "minilm": _cost("minilm", "negative logits made equal"),
    }


def _opposition_rows(record: dict[str, Any]) -> Rows:
    results = Results(record)
    rows = [
        [label, *(_text(opposition.distance(results, label, pair)) for pair in opposition.PAIRS)]
        for label in results.labels
        if results.get("opposition", label)
    ]
    return [row for row in rows if row[1]]


def irrelevant_or_opposed(record: dict[str, Any]) -> list[str]:
    results, numbers = Results(record), _opposition_numbers(record)
    answer = f"""
        Mechanisms whose weights can be negative tell an irrelevant key (logit 0) from an opposed
        one (logit −4); non-negative ones hardly do. The difference is d′ {numbers["cog"]} for cog and
        {numbers["softmax"]} for softmax, where 1 means right in 76 % of choices between two. The sign
        of the weight is necessary; a free row sum adds little alone and much together with it
        ({numbers["features"]}). Trained from scratch, one head of cog solves the task
        `opposition`, one head of softmax does not (numbers below). Pretrained softmax models use
        negative logits mostly as an off switch: in SmolLM2 {numbers["negative"]} of logits are negative,
        and making all of them equal costs {numbers["equal"]} nats, against
        {numbers["zero"]} if they are set to 0. So it separates relevant
        from other keys, and hardly irrelevant from opposed ones. MiniLM uses their sizes: its states
        change by {numbers["minilm"]} of their norm.
    """
    lines = _head(
        "Irrelevant or opposed?",
        "Which models can tell irrelevant from opposed keys, and which features enable it?",
        answer,
        "irrelevant-or-opposed",
    )
    lines += ["## Mechanisms", "", "d′: difference of two weights over the noise of 63 other keys (↑).", ""]
    titles = ("mechanism", *(f"{a:g} against {b:g}" for a, b in opposition.PAIRS))
    lines += _by_mechanism(titles, _opposition_rows(record))
    lines += ["## Features", "", "Formulas that differ in one feature; chance is 0.333.", ""]
    for part in features.parts(results):
        cells = [[row[c["name"]] for c in part.columns] for row in part.rows]
        lines += [*table([c["title"] for c in part.columns], cells), part.text, ""]
    lines += logits_of(stored())
    lines += ["## Literature", "", "The survey found no work that measures this. The closest are:", ""]
    lines += table(("work", "signed quantity", "reported gain"), [SIGNED_HEADS, BEYOND[0], BEYOND[2]])
    return lines + _claims(
        record, "sign-decides", "erased-differences", "influence-factors", "trained-opposition"
    )


def _influence_numbers(record: dict[str, Any]) -> dict[str, str]:
    gains = {mechanism: _gain(mechanism) for mechanism in ("sinh", "gpam", "softmax1")}
    return {"noise": _found(record, "forced-noise"), **gains}


def _influence_rows(record: dict[str, Any]) -> Rows:
    rows = Results(record).get("features")
    shown = []
    for name, signed, total in (
        ("softmax", "no", "1"),
        ("softmax1", "no", "free"),
        ("sinh, sum 1", "yes", "1"),
        ("sinh", "yes", "free"),
    ):
        values = [row["accuracy"] for row in rows if row["formula"] == name]
        if values:
            shown.append([name, signed, total, sum(values) / len(values)])
    return shown


def influence_factors(record: dict[str, Any]) -> list[str]:
    numbers = _influence_numbers(record)
    answer = f"""
        Several attention mechanisms and some networks beyond attention replace probabilities by
        signed or unnormalised influence factors (tables below). In our measurements the sign is
        what helps: with signed weights keys are told apart far better, while a free row sum alone
        changes next to nothing. A free sum has another benefit, which grows as keys become
        irrelevant: it injects less noise ({numbers["noise"]}). Published gains in
        language models are small or rest on one seed. Trained from scratch, signed weights help
        whether their sum is free (sinh: {numbers["sinh"]} over softmax on `opposition`) or fixed (gpam:
        {numbers["gpam"]}); a free sum without signs does not (softmax1: {numbers["softmax1"]}).
    """
    lines = _head(
        "Influence factors",
        "Which works replace the probability model by influence factors, and what do they gain?",
        answer,
        "influence-factors",
    )
    titles = ("work", "weights", "row sum", "expected gain", "reported result")
    lines += ["## Attention", "", *table(titles, ATTENTION)]
    lines += ["## Beyond attention", "", *table(("work", "signed quantity", "reported gain"), BEYOND)]
    lines += ["## Sign and free sum, separately", ""]
    lines += ["Accuracy on support, opposition or neither (chance 0.333).", ""]
    lines += table(("formula", "signed", "row sum", "accuracy"), _influence_rows(record))
    lines += [
        "## Trained",
        "",
        "One head trained from scratch; the difference to softmax is paired by seed.",
        "",
    ]
    rows = [
        [one.group, one.mechanism, *SIGNED_AND_FREE[one.mechanism], one.mean, _difference(one)]
        for one in _influence()
        if one.mean is not None
    ]
    lines += table(("task", "mechanism", "signed", "row sum", "accuracy (↑)", "over softmax (95 % CI)"), rows)
    return lines + _claims(record, "influence-factors", "forced-noise", "non-negativity", "trained-influence")


def _influence() -> list[ResultSummary]:
    """Return the summaries of the study ``influence``."""
    return summarise([run for run in read_records(PACKAGED) if run.study == "influence"])


def _difference(one: ResultSummary) -> str:
    gap = one.difference
    return "reference" if gap is None else f"{gap.mean:+.2f} ({between(gap.low, gap.high)})"


def _gain(mechanism: str) -> str:
    """Return the gain over softmax on opposition."""
    return next(
        _difference(one) for one in _influence() if (one.group, one.mechanism) == ("opposition", mechanism)
    )


def _deletion_numbers(record: dict[str, Any]) -> dict[str, str]:
    shares = {label: _short(deletion.share(Results(record), label)) for label in ("softmax", "cog")}
    return shares | {
        key: str(number)
        for model, (count, total) in mlp_counts(stored()).items()
        for key, number in ((f"{model}_deleting", count), (f"{model}_mlps", total))
    }


def _deletion_rows(record: dict[str, Any]) -> Rows:
    results = Results(record)
    rows = [
        [label, *(_text(deletion.share(results, label, f)) for f in deletion.FIELDS)]
        for label in results.labels
    ]
    return [row for row in rows if row[1]]


def deletion_quantified(record: dict[str, Any]) -> list[str]:
    results, numbers = Results(record), _deletion_numbers(record)
    answer = f"""
        Three works quantify deletion in pretrained softmax models, all through the value and output
        maps of particular heads (literature below). Our measurements agree that softmax heads
        delete, but always the same sources: the query decides {numbers["softmax"]} of what a random
        softmax head moves, and {numbers["cog"]} of what a cog head moves. In SmolLM2-135M, ablating
        its deleting heads costs more than ablating others, but removing only what they delete costs
        not clearly more than removing as much elsewhere. So deletion as such is not shown to matter
        there. MLPs delete too: {mlp_sentence(stored())}
    """
    lines = _head(
        "Deletion, quantified", "Which works quantify deletion in attention and networks?", answer, "deletion"
    )
    lines += ["## Literature", "", *table(("work", "what was measured"), DELETION)]
    for part in deletion.SECTION.tables[0](results):
        lines += ["## Random heads", "", part.text, ""]
        lines += _by_mechanism([c["title"] for c in part.columns], _deletion_rows(record))
    lines += [*heads_of(stored()), *mlp_of(stored())]
    return lines + _claims(record, "softmax-only-adds", "dynamic-deletion", "deletion", "trained-deletion")


def _deletion_figure(results: Results) -> Figure:
    """Return a bar for each mechanism: the share of what a head moves that the query decides."""
    rows = []
    for label in SHOWN:
        if (decided := deletion.share(results, label)) is not None:
            rows.append(
                {"mechanism": label, "share": decided.value, "low": decided.lower, "high": decided.upper}
            )
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("mechanism:N", sort=list(SHOWN), title=None))
    bars = base.mark_bar().encode(
        x=alt.X("share:Q", title="share that the query decides", scale=alt.Scale(domain=[0, 1]))
    )
    intervals = base.mark_rule().encode(x="low:Q", x2="high:Q")
    note = "Random heads with value and output maps. 0: the maps alone decide. Lines: 95 % intervals."
    return Figure("deletion", "Who decides what is deleted?", note, rows, bars + intervals)


def _collapse_numbers(record: dict[str, Any]) -> dict[str, str]:
    verdict, ratios = squashing_verdict(stored())
    return {
        **{
            label: _short(t_interval(collapse.layers_kept(own)))
            for label in ("softmax", "cog")
            if (own := Results(record).get("collapse", label))
        },
        "verdict": verdict,
        **{network: f"{ratio.value:.2g}" for network, ratio in ratios.items()},
    }


def _collapse_rows(record: dict[str, Any]) -> Rows:
    results = Results(record)
    noise = results.get(collapse.NOISE)
    return [
        [label, str(t_interval(collapse.layers_kept(own))), str(t_interval(collapse.evolved(own, noise)))]
        for label in results.labels
        if (own := results.get("collapse", label)) and noise
    ]


def evolution_or_collapse(record: dict[str, Any]) -> list[str]:
    numbers = _collapse_numbers(record)
    answer = f"""
        We call a change of representations evolution while their rank and the decodable input
        remain, collapse when the rank falls, and noise when the input can no longer be decoded. By
        this rule attention alone collapses within two layers, with cog ({numbers["cog"]}
        layers keep half) as fast as with softmax ({numbers["softmax"]}). With skip
        connections, small trained networks, SmolLM2 and MiniLM evolve in their first layers. In the small
        networks the next token becomes easier to decode with depth while the input fades. Cog's
        robustness as its authors define it, over-squashing, is {numbers["verdict"]}: it keeps
        the states of n and n + 1 repetitions {numbers["random"]} times as
        far apart as softmax in random networks, but only
        {numbers["trained"]} times as far in trained
        networks. GPAM slows the collapse of one layer by a constant factor but keeps the cubic rate.
    """
    lines = _head(
        "Evolution or collapse",
        "What separates the evolution of representations from their collapse?",
        answer,
        "evolution-or-collapse",
    )
    lines += ["## Literature", "", *table(("work", "finding"), COLLAPSE)]
    lines += ["## Random networks", "", collapse.SECTION.about, ""]
    titles = ("mechanism", "layers that keep half (↑)", "input decoded beyond noise, with skips (↑)")
    lines += _by_mechanism(titles, _collapse_rows(record))
    lines += [
        *trained_of(stored()),
        *squashing_of(stored()),
        *states_of(stored(), "smollm2"),
        *states_of(stored(), "minilm"),
        *distances_of(stored()),
    ]
    return lines + _claims(record, "cog-robust", "slower-collapse", "cubic-collapse", "head-collapse")


def _short(estimate: Estimate | None) -> str:
    """Return a value with two digits, or "not measured"."""
    return "not measured" if estimate is None else f"{estimate.value:.2g}"


FIGURES = {
    "irrelevant-or-opposed": "opposition",
    "influence-factors": "forced-mass",
    "deletion": "deletion",
    "evolution-or-collapse": "collapse-rank",
}
"""The figure below the answer of each page."""
PAGES: dict[str, Page] = {
    "irrelevant-or-opposed": irrelevant_or_opposed,
    "influence-factors": influence_factors,
    "deletion": deletion_quantified,
    "evolution-or-collapse": evolution_or_collapse,
}
CONTENTS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, str]], Callable[[dict[str, Any]], Rows]]] = {
    "irrelevant-or-opposed": (_opposition_numbers, _opposition_rows),
    "influence-factors": (_influence_numbers, _influence_rows),
    "deletion": (_deletion_numbers, _deletion_rows),
    "evolution-or-collapse": (_collapse_numbers, _collapse_rows),
}
"""For each page, the numbers of its answer and the rows of its main table."""

if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
