"""``unsoft neurons``: find the neurons of a language model that regulate its confidence."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsoft.cli import arguments
from unsoft.cli.arguments import AsJson, LanguageModel, ToRecords, load_reader, unset, wrong
from unsoft.cli.terminal import cell, console, print_json, progress, show_table

if TYPE_CHECKING:
    from unsoft.lab.interpret.neurons import Scan

_SHOWN = 10
_STEPS = ("reading the text", "ablating neurons")


def command(
    model: LanguageModel,
    text: Annotated[Path | None, unset("Text to read, UTF-8; default: Python's language reference.")] = None,
    out: ToRecords = None,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to measure on.")] = 4096,
    length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 256,
    null: Annotated[int | None, unset("Size of the null space; default: 1 % of the width.", min=1)] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Neurons of each kind with details.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of controls and confidence intervals.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Find entropy neurons and token-frequency neurons.

    Ablates each neuron and compares with controls. The model is not changed.

    \b
    Examples:
      unsoft neurons smollm2 --out neurons
      unsoft neurons smollm2 --tokens 2048 --text book.txt
    """
    content = _python_reference() if text is None else arguments.read_text(text, "'--text'")
    if out is not None:
        arguments.check_folder(out)
    from unsoft.lab.interpret.neurons import scan

    network, tokenizer, longest = load_reader(
        model, length, "unsoft.lab.interpret.neurons.scan(model, tokens)"
    )
    with progress(100 * len(_STEPS)) as show:

        def report(stage: str, done: int, total: int) -> None:
            show(round(100 * (_STEPS.index(stage) + done / total)), stage, stage)

        result = scan(
            network,
            content,
            tokenizer=tokenizer,
            tokens=tokens,
            length=longest,
            null=null,
            candidates=candidates,
            seed=seed,
            progress=report,
        )
    result = replace(result, model=model)
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result)
    if out is None:
        return
    arguments.prepare_folder(out)
    source = "" if text is None else f" --text {shlex.quote(str(text))}"
    size = f" --tokens {tokens} --length {length}"
    command = f"unsoft neurons {shlex.quote(model)}{source}{size} --seed {seed}"
    for path in result.write(out, command):
        typer.echo(str(path), err=as_json)


def _print(result: Scan) -> None:
    from unsoft.lab.interpret.neurons.result import ROLES, TITLES
    from unsoft.lab.report.page import printable

    screen = console()
    settings = result.settings
    screen.print(
        f"{printable(result.model, 80)}: {len(result.neurons)} neurons of layer {result.layer} (of"
        f" {result.layers}), {settings['tokens']} tokens, {settings['controls']} controls each,"
        f" {settings['norm']}, null space of {settings['null']} of {settings['width']} directions"
    )
    for role in ROLES:
        members = {record["neuron"] for record in role.members(result.neurons)}
        ranked = role.ranked(result.neurons)
        surviving = sum(role.survives(record) for record in ranked)
        screen.print(
            f"\n{len(members)} {role.name} neurons: {role.meaning};"
            f" {surviving} neurons pass the test, {surviving - len(members)} of them without such weights"
        )
        columns = dict.fromkeys(("neuron", *(TITLES[name].title for name in role.columns), ""), "right")
        rows = [
            [cell(record[name]) for name in ("neuron", *role.columns)]
            + [role.name if record["neuron"] in members else "passes" if role.survives(record) else ""]
            for record in ranked[:_SHOWN]
        ]
        show_table(columns, rows, box=False)
    for verdict in result.verdicts:
        screen.print(f"{verdict['claim']}: {verdict['verdict']}; {verdict['found']}")


def _python_reference() -> str:
    """Return the language reference that comes with Python: some 110,000 tokens of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise wrong("this Python has no language reference; give a file", "'--text'") from None
    return "\n\n".join(topics.values())
