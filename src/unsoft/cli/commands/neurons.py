"""``unsoft neurons``: which neurons of a language model regulate its confidence."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsoft.cli.arguments import AsJson, check_folder, load_reader, path_option, prepare_folder, read_text
from unsoft.cli.terminal import cell, console, progress, show_table

if TYPE_CHECKING:
    from unsoft.lab.interpret.neurons import Scan

_SHOWN = 10
_STEPS = ("reading the text", "ablating neurons")


def command(
    model: Annotated[str, typer.Argument(help="smollm2, a folder, or a name on the hub.")],
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text to look at, UTF-8; without it Python's language reference.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        path_option("Keep records (JSON, CSV) and a page (HTML) in this folder.", show_default=False),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="A layer other than the last; the model itself runs ablated then.", show_default=False
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens are looked at.")] = 4096,
    length: Annotated[
        int, typer.Option(min=2, help="Tokens of each sequence that the text is cut into.")
    ] = 256,
    null: Annotated[
        int | None,
        typer.Option(
            min=1, help="Directions of the null space; 1 % of the width if not given.", show_default=False
        ),
    ] = None,
    counts: Annotated[
        Path | None,
        typer.Option(
            help="How often each word occurs, a JSON list; counted in the text if not given.",
            show_default=False,
        ),
    ] = None,
    candidates: Annotated[
        int,
        typer.Option(
            min=1, help="How many neurons, ranked by weights, to show; in another layer, to ablate."
        ),
    ] = 16,
    seed: Annotated[int, typer.Option(help="Seed of controls and intervals.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Find entropy neurons and token-frequency neurons: ablate every neuron of a layer and compare with
    controls.

    Nothing of the model is changed.

    \b
    Examples:
      unsoft neurons smollm2 --out neurons
      unsoft neurons smollm2 --layer 20 --tokens 2048 --text book.txt
    """
    words = _python_reference() if text is None else read_text(text, "'--text'")
    if out is not None:
        check_folder(out)
    from unsoft.lab.interpret.neurons import scan
    from unsoft.lab.interpret.neurons.frequency import read_counts

    counted = None if counts is None else read_counts(counts)
    network, tokenizer, longest = load_reader(
        model, length, "unsoft.lab.interpret.neurons.scan(model, tokens)"
    )
    with progress(100 * len(_STEPS)) as show:

        def tell(what: str, done: int, total: int) -> None:
            show(round(100 * (_STEPS.index(what) + done / total)), what, what)

        found = scan(
            network,
            words,
            tokenizer=tokenizer,
            layer=layer,
            tokens=tokens,
            length=longest,
            null=null,
            counts=counted,
            candidates=candidates,
            seed=seed,
            progress=tell,
        )
    found = replace(found, model=model)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        _print(found)
    if out is None:
        return
    from unsoft.files import write_whole
    from unsoft.lab.interpret.neurons.page import neurons_page

    page = neurons_page(found).encode()
    prepare_folder(out)
    given = "" if text is None else f" --text {shlex.quote(str(text))}"
    where = "" if layer is None else f" --layer {layer}"
    size = f" --tokens {tokens} --length {length}"
    written = found.write(out, f"unsoft neurons {shlex.quote(model)}{given}{where}{size} --seed {seed}")
    write_whole(out / "neurons.html", page)
    for path in (*written, out / "neurons.html"):
        typer.echo(str(path), err=as_json)


def _print(found: Scan) -> None:
    from unsoft.lab.interpret.neurons.columns import TITLES
    from unsoft.lab.interpret.neurons.roles import ROLES
    from unsoft.lab.report.page import printable

    screen = console()
    told = found.settings
    screen.print(
        f"{printable(found.model, 80)}: {len(found.neurons)} neurons of layer {found.layer} (of"
        f" {found.layers}), {told['tokens']} tokens, {told['controls']} controls each, {told['norm']}, null"
        f" space of {told['null']} of {told['width']} directions"
    )
    for role in ROLES:
        members = {record["neuron"] for record in role.members(found.neurons)}
        ranked = role.ranked(found.neurons)
        surviving = sum(role.survives(record) for record in ranked)
        screen.print(
            f"\n{len(members)} {role.name} neurons: {role.meaning};"
            f" {surviving} neurons pass the test, {surviving - len(members)} of them without such weights"
        )
        columns = dict.fromkeys(("neuron", *(TITLES[name].title for name in role.columns), ""), "right")
        rows = [
            [
                cell(record["neuron"]),
                *(cell(record[name]) for name in role.columns),
                role.name if record["neuron"] in members else "passes" if role.survives(record) else "",
            ]
            for record in ranked[:_SHOWN]
        ]
        show_table(columns, rows, box=False)
    for verdict in found.verdicts:
        screen.print(f"{verdict['claim']}: {verdict['verdict']}; {verdict['found']}")


def _python_reference() -> str:
    """The language reference that comes with Python: some 110,000 tokens of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise typer.BadParameter(
            "this Python comes without its language reference, which is read by default; give a file",
            param_hint="'--text'",
        ) from None
    return "\n\n".join(topics.values())
