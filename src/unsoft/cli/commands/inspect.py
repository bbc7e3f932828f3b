"""``unsoft inspect``: find the heads of a model that are sinks, are hijacked, or delete."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsoft.cli import arguments
from unsoft.cli.arguments import AsJson, Model, Open, Plugin, ToRecords, load_reader, unset, wrong
from unsoft.cli.terminal import cell, console, print_json, progress, show_table

if TYPE_CHECKING:
    from unsoft.lab.interpret.inspection import Inspection

_SHOWN = 8  # heads of each role in the terminal
_SENTENCES = 3


def command(
    model: Model,
    text: Annotated[Path | None, unset("Text to read, UTF-8; default: a built-in page.")] = None,
    out: ToRecords = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 512,
    sequences: Annotated[int, typer.Option(min=1, help="Maximum number of sequences.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 4,
    sentence: Annotated[
        list[str] | None, unset("Sentence whose patterns the page shows; may be repeated.")
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Measure the loss without the strongest heads of each role.")
    ] = False,
    open: Open = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Measure every attention head of a model.

    Measures focus, sinks, hijacking by near-duplicate keys, deletion and collapse. Inspection is read-only;
    --ablate disables heads temporarily.

    \b
    Examples:
      unsoft inspect smollm2 --out inspection
      unsoft inspect smollm2 --ablate --text book.txt --sequences 8
    """
    arguments.load_plugin(plugin)
    from unsoft.lab.interpret.inspection import inspect as inspect_model
    from unsoft.lab.interpret.inspection.result import SAMPLE

    content = SAMPLE.read_text() if text is None else arguments.read_text(text, "'--text'")
    if out is not None:
        arguments.prepare_folder(out)
    network, tokenizer, longest = load_reader(model, length, "unsoft.lab.interpret.inspect(model, batch)")
    if ablate and not network.can_generate():
        raise wrong(f"{model} predicts no next token, so it has no loss to compare", "'--ablate'")
    with progress(100) as show:

        def report(done: int, total: int) -> None:
            show(round(100 * done / total), "inspecting", f"inspecting, {done} of {total} sequences")

        inspection = inspect_model(
            network,
            content,
            tokenizer=tokenizer,
            batch_size=batch,
            max_length=longest,
            max_sequences=sequences,
            progress=report,
        )
    inspection = replace(inspection, model=model)
    if ablate:
        inspection = replace(inspection, ablation=_ablated(network, content, inspection, tokenizer))
    if as_json:
        print_json(inspection.to_dict())
    else:
        _print(inspection)
    if out is None:
        return
    from unsoft.lab.interpret.inspection.page import find_patterns

    patterns = find_patterns(network, sentence or first_sentences(content), tokenizer)
    for path in inspection.write(out, patterns):
        typer.echo(str(path), err=as_json)
    arguments.open_page(out / "inspection.html", wanted=open)


def _ablated(network: Any, text: str, inspection: Inspection, tokenizer: Any) -> dict[str, Any]:
    from unsoft.lab.interpret.inspection.ablation import ablate

    with progress(100) as show:

        def report(done: int, total: int, heads: str) -> None:
            show(round(100 * done / total), "ablating", f"ablating {heads}")

        return ablate(network, text, inspection, tokenizer=tokenizer, progress=report)


def first_sentences(text: str, count: int = _SENTENCES) -> list[str]:
    """Return the first sentences of a text that have more than three words.

    >>> first_sentences("Hm. This is a sentence.  And is this another one? Yes.")
    ['This is a sentence.', 'And is this another one?']
    """
    pieces = (" ".join(piece.split()) for piece in re.split(r"(?<=[.!?])\s+", text[:20_000]))
    sentences = [piece for piece in pieces if len(piece.split()) > 3][:count]
    return sentences or [text[:200]]


def _print(inspection: Inspection) -> None:
    from unsoft.lab.interpret.inspection.result import ROLES, TITLES
    from unsoft.lab.report.page import printable

    screen = console()
    screen.print(
        f"{printable(inspection.model, 80)}: {len(inspection.heads)} heads in {len(inspection.layers)}"
        f" layers, {inspection.tokens} tokens in {inspection.sequences} sequences"
    )
    for line in inspection.skipped:
        screen.print(f"not inspected: {printable(line, 200)}")
    for role in ROLES:
        heads = role.heads(inspection.heads)
        screen.print(f"\n{len(heads)} {role.name} heads: {role.meaning}")
        if not heads:
            continue
        titles = (TITLES[name].title for name in role.columns)
        rows = [[cell(head[name]) for name in ("layer", "head", *role.columns)] for head in heads[:_SHOWN]]
        show_table(dict.fromkeys(("layer", "head", *titles), "right"), rows, box=False)
        if len(heads) > _SHOWN:
            screen.print(f"and {len(heads) - _SHOWN} more")
    screen.print("\nthe residual stream")
    fields = ("depth", "mean_cosine", "effective_rank", "stable_rank", "recovery", "residual")
    step = max(1, -(-len(inspection.depths) // 8))
    rows = [[cell(record[field]) for field in fields] for record in inspection.depths[::step]]
    show_table(dict.fromkeys((field.replace("_", " ") for field in fields), "right"), rows, box=False)
    if inspection.ablation is not None:
        _print_ablation(inspection.ablation)


def _print_ablation(ablation: dict[str, Any]) -> None:
    console().print(
        f"\nablation: loss of the whole model {ablation['loss']:.4f} nats per token, {ablation['tokens']}"
        f" tokens in {ablation['sequences']} sequences, {ablation['draws']} random sets"
    )
    rows = []
    for one in ablation["removed"]:
        change = f"{one['change']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})"
        beside = ["", ""]
        if one["difference"] is not None:
            ends = f"({one['difference_low']:+.4f} to {one['difference_high']:+.4f})"
            beside = [f"{one['random']:+.4f}", f"{one['difference']:+.4f} {ends}"]
        rows.append([one["role"], one["heads"], change, *beside, one["verdict"]])
    columns = {"role": "left", "heads": "left", "loss": "right", "random": "right", "difference": "right"}
    show_table(columns | {"": "left"}, rows, box=False, keys=2)
