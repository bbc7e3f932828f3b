"""``unsoft inspect``: which heads of a model are sinks, which are hijacked, which delete."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsoft.cli.arguments import AsJson, load_reader, path_option, prepare_folder, read_text
from unsoft.cli.terminal import cell, console, progress, show_table

if TYPE_CHECKING:
    from unsoft.lab.interpret.inspection import Inspection

_SHOWN = 8  # heads of each role in the terminal
_SENTENCES = 3


def command(
    model: Annotated[str, typer.Argument(help="smollm2, minilm, a folder, or a name on the hub.")],
    text: Annotated[
        Path | None,
        typer.Option(help="Text to look at, UTF-8; without it a page of our own.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        path_option("Keep records (JSON, CSV) and a page (HTML) in this folder.", show_default=False),
    ] = None,
    length: Annotated[
        int, typer.Option(min=2, help="Tokens of each sequence that the text is cut into.")
    ] = 512,
    sequences: Annotated[int, typer.Option(min=1, help="How many sequences to look at, at most.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that go through the model at a time.")] = 4,
    sentence: Annotated[
        list[str] | None,
        typer.Option(help="A sentence whose patterns the page shows; may be repeated.", show_default=False),
    ] = None,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate", help="Remove the strongest heads of each role, and random ones: what is lost?"
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure every head of a model: focus, sinks, hijacking by look-alike keys, deletion, collapse by depth.

    The model is only watched, nothing is swapped or changed; --ablate silences heads for a while.

    \b
    Examples:
      unsoft inspect smollm2 --out inspection
      unsoft inspect smollm2 --ablate --text book.txt --sequences 8
    """
    words = _read(text)
    if out is not None:
        prepare_folder(out)
    from unsoft.lab.interpret.inspection import inspect as inspect_model

    network, tokenizer, longest = load_reader(model, length, "unsoft.lab.interpret.inspect(model, batch)")
    if ablate and not network.can_generate():
        raise typer.BadParameter(
            f"{model} predicts no next token, so there is no loss without a head", param_hint="'--ablate'"
        )
    with progress(100) as show:

        def tell(done: int, total: int) -> None:
            show(round(100 * done / total), "watching", f"watching, {done} of {total} sequences")

        found = inspect_model(
            network,
            words,
            tokenizer=tokenizer,
            batch_size=batch,
            max_length=longest,
            max_sequences=sequences,
            progress=tell,
        )
    found = replace(found, model=model)
    if ablate:
        found = replace(found, ablation=_ablated(network, words, found, tokenizer))
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        _print(found)
    if out is None:
        return
    from unsoft.files import write_whole
    from unsoft.lab.interpret.inspection.page import inspection_page
    from unsoft.lab.interpret.inspection.patterns import find_patterns

    patterns = find_patterns(network, sentence or first_sentences(words), tokenizer)
    write_whole(out / "inspection.html", inspection_page(found, patterns).encode())
    for path in (*found.write(out), out / "inspection.html"):
        typer.echo(str(path), err=as_json)


def _ablated(network: Any, words: str, found: Inspection, tokenizer: Any) -> dict[str, Any]:
    from unsoft.lab.interpret.inspection.ablation import ablate

    with progress(100) as show:

        def tell(done: int, total: int, words: str) -> None:
            show(round(100 * done / total), "removing", f"removing {words}")

        return ablate(network, words, found, tokenizer=tokenizer, progress=tell)


def first_sentences(text: str, count: int = _SENTENCES) -> list[str]:
    """Sentences of a few words that begin a text.

    >>> first_sentences("Hm. This is a sentence.  And is this another one? Yes.")
    ['This is a sentence.', 'And is this another one?']
    """
    pieces = (" ".join(piece.split()) for piece in re.split(r"(?<=[.!?])\s+", text[:20_000]))
    found = [piece for piece in pieces if len(piece.split()) > 3][:count]
    return found or [text[:200]]


def _read(path: Path | None) -> str:
    from unsoft.lab.interpret import inspection

    if path is None:
        return (Path(inspection.__file__).parent / "sample.txt").read_text()
    return read_text(path, "'--text'")


def _print(found: Inspection) -> None:
    from unsoft.lab.interpret.inspection.columns import TITLES
    from unsoft.lab.interpret.inspection.roles import ROLES
    from unsoft.lab.report.page import printable

    screen = console()
    screen.print(
        f"{printable(found.model, 80)}: {len(found.heads)} heads in {len(found.layers)} layers,"
        f" {found.tokens} tokens in"
        f" {found.sequences} sequences"
    )
    for line in found.skipped:
        screen.print(f"not looked at: {printable(line, 200)}")
    for role in ROLES:
        heads = found.ranked(role)
        screen.print(f"\n{len(heads)} {role.name}: {role.meaning}")
        if not heads:
            continue
        titles = (TITLES[name].title if name in TITLES else "token" for name in role.columns)
        rows = [[cell(head[name]) for name in ("layer", "head", *role.columns)] for head in heads[:_SHOWN]]
        show_table(dict.fromkeys(("layer", "head", *titles), "right"), rows, box=False)
        if len(heads) > _SHOWN:
            screen.print(f"and {len(heads) - _SHOWN} more")
    screen.print("\nthe residual stream")
    fields = ("depth", "mean_cosine", "effective_rank", "stable_rank", "recovery", "residual")
    step = max(1, -(-len(found.depths) // 8))
    rows = [[cell(record[field]) for field in fields] for record in found.depths[::step]]
    show_table(dict.fromkeys((field.replace("_", " ") for field in fields), "right"), rows, box=False)
    if found.ablation is not None:
        _print_ablation(found.ablation)


def _print_ablation(ablation: dict[str, Any]) -> None:
    console().print(
        f"\nwithout them: loss {ablation['loss']:.4f} nats per token as it is, {ablation['tokens']} tokens in"
        f" {ablation['sequences']} sequences, {ablation['draws']} random sets"
    )
    rows = []
    for one in ablation["removed"]:
        beside = one["difference"]
        rows.append(
            [
                one["role"],
                one["heads"],
                f"{one['change']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})",
                "" if beside is None else f"{one['random']:+.4f}",
                ""
                if beside is None
                else f"{beside:+.4f} ({one['difference_low']:+.4f} to {one['difference_high']:+.4f})",
                one["verdict"],
            ]
        )
    columns = {"role": "left", "heads": "left", "loss": "right", "random": "right", "difference": "right"}
    show_table(columns | {"": "left"}, rows, box=False, keys=2)
