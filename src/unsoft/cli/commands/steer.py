"""``unsoft steer``: push a model along a direction inside it, and find out whether that is real."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unsoft.cli.arguments import AsJson, check_file, path_option, prepare_folder
from unsoft.cli.steer_inputs import lines, listed, load, pairs, places, prose
from unsoft.cli.steer_tables import show_judgement
from unsoft.cli.terminal import console, progress, show_table

command = typer.Typer(
    help="""Push a model along directions inside it, and find out whether that is real.

    \b
    Examples:
      unsoft steer check smollm2
      unsoft steer fit smollm2 --out joy.safetensors
    """,
    rich_markup_mode=None,
)

Model = Annotated[str, typer.Argument(help="smollm2, a folder, or a name on the hub.")]
Positive = Annotated[
    Path | None,
    typer.Option(
        help="Texts with the property, a line each; without it pairs of our own.", show_default=False
    ),
]
Negative = Annotated[
    Path | None,
    typer.Option(
        help="Texts without the property; each line is the counterpart of one of --positive.",
        show_default=False,
    ),
]
Method = Annotated[str, typer.Option(help="mean, pca or probe.")]
Layers = Annotated[
    str | None,
    typer.Option(help="Layers, such as 3, 4-7 or 0,8-; default: the middle third.", show_default=False),
]
Site = Annotated[str, typer.Option(help="What is steered: the output of a block, or that of its mlp.")]
Pool = Annotated[str, typer.Option(help="The state of a text: last, that of its last token, or mean.")]
Strength = Annotated[
    float, typer.Option(help="How far to push; 1 is the distance between the two kinds of texts.")
]
Positions = Annotated[
    str, typer.Option(help="Tokens that are steered: all, prompt, generated, or numbers such as 0,-1.")
]
KeepNorm = Annotated[bool, typer.Option("--keep-norm", help="States keep their length and only turn.")]


@command.command()
def fit(
    model: Model,
    out: Annotated[Path, path_option("The file to write, such as joy.safetensors.")],
    positive: Positive = None,
    negative: Negative = None,
    method: Method = "mean",
    layers: Layers = None,
    site: Site = "block",
    pool: Pool = "last",
    as_json: AsJson = False,
) -> None:
    """Find directions from pairs of texts, and keep them in a file.

    \b
    Examples:
      unsoft steer fit smollm2 --out joy.safetensors
      unsoft steer fit smollm2 --positive a.txt --negative b.txt --out mine.safetensors
    """
    halves = pairs(positive, negative)
    check_file(out)
    from unsoft.lab.interpret import steering

    network, tokenizer = load(model)
    found = steering.fit(
        network, *halves, tokenizer, method=method, layers=listed(layers), site=site, pool=pool
    )
    found.save(out)
    if as_json:
        about = {"file": str(out), "method": found.method, "site": found.site, "norms": found.norms()}
        typer.echo(json.dumps(about, indent=1))
        return
    show_table(
        {"layer": "right", "length of the direction": "right"},
        [[layer, f"{norm:.3g}"] for layer, norm in found.norms().items()],
        box=False,
    )
    typer.echo(str(out))


@command.command()
def generate(
    model: Model,
    directions: Annotated[Path, typer.Argument(help="What unsoft steer fit wrote.")],
    prompt: Annotated[list[str], typer.Option(help="A text to continue; may be repeated.")],
    strength: Strength = 1.0,
    layers: Layers = None,
    positions: Positions = "all",
    keep_norm: KeepNorm = False,
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens to write.")] = 40,
    as_json: AsJson = False,
) -> None:
    """Let a model continue a prompt, as it is and steered, by the likeliest token at each step.

    \b
    Examples:
      unsoft steer generate smollm2 joy.safetensors --prompt "The weather is"
      unsoft steer generate smollm2 joy.safetensors --prompt "Today I" --strength 0.5 --tokens 20
    """
    from unsoft.lab.interpret.steering import Directions, steering
    from unsoft.lab.interpret.steering.states import encoded
    from unsoft.lab.report.page import printable

    found = Directions.load(directions)
    network, tokenizer = load(model)
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    if network.generation_config is not None and network.generation_config.pad_token_id is None:
        options["pad_token_id"] = tokenizer.eos_token_id

    def continued(text: str) -> str:
        given = encoded(text, tokenizer, network)
        written = network.generate(**given, **options)[0, given["input_ids"].shape[1] :]  # type: ignore[operator]
        return str(tokenizer.decode(written, skip_special_tokens=True))

    screen, results = console(), []
    for text in prompt:
        plain = continued(text)
        with steering(
            network,
            found,
            strength,
            layers=listed(layers),
            positions=places(positions),
            keep_norm=keep_norm,
        ):
            steered = continued(text)
        results.append({"prompt": text, "as it is": plain, "steered": steered})
        if not as_json:
            screen.print(f"prompt   {printable(text, 200)}")
            screen.print(f"as it is {printable(plain, 2000)}")
            screen.print(f"steered  {printable(steered, 2000)}")
    if as_json:
        typer.echo(json.dumps(results, indent=1))


@command.command()
def check(
    model: Model,
    positive: Positive = None,
    negative: Negative = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts to measure on, which were not used to find the direction.", show_default=False
        ),
    ] = None,
    toward: Annotated[
        Path | None, typer.Option(help="Words that should come next more often.", show_default=False)
    ] = None,
    away: Annotated[
        Path | None, typer.Option(help="Words that should come next less often.", show_default=False)
    ] = None,
    other_positive: Annotated[
        Path | None,
        typer.Option(
            help="Pairs of another task, as a control: texts with its property.", show_default=False
        ),
    ] = None,
    other_negative: Annotated[Path | None, typer.Option(help="Texts without it.", show_default=False)] = None,
    unrelated: Annotated[
        Path | None, typer.Option(help="Text that steering should leave alone.", show_default=False)
    ] = None,
    method: Method = "mean",
    layers: Layers = None,
    site: Site = "block",
    pool: Pool = "last",
    strength: Strength = 0.1,
    positions: Positions = "all",
    keep_norm: KeepNorm = False,
    out: Annotated[
        Path | None,
        path_option("Keep table, verdict, directions and a page in this folder.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Is it cheating or a real intervention? One table of controls, by rules that were fixed before.

    Without files: pairs of happy and unhappy sentences of our own, past and future as the other task.

    \b
    Examples:
      unsoft steer check smollm2
      unsoft steer check smollm2 --strength 0.2 --out steering
    """
    from unsoft.lab.interpret.steering.text_check import TextQuestion, check_text

    question = TextQuestion(
        *pairs(positive, negative),
        prompts=lines(prompts, "prompts"),
        toward=lines(toward, "toward"),
        away=lines(away, "away"),
        other=pairs(other_positive, other_negative, "other_"),
        unrelated=prose(unrelated),
    )
    if out is not None:
        from unsoft.cli.arguments import check_drawing

        check_drawing()
        prepare_folder(out)
    network, tokenizer = load(model)
    from unsoft.lab.interpret.steering.controls import steps

    with progress(steps(bounds=1)) as bar:
        count = iter(range(steps(bounds=1)))
        directions, judgement = check_text(
            network,
            tokenizer,
            question,
            method=method,
            layers=listed(layers),
            site=site,
            pool=pool,
            strength=strength,
            positions=places(positions),
            keep_norm=keep_norm,
            said=lambda words: bar(next(count), words, words),
        )
    if as_json:
        typer.echo(json.dumps(judgement.to_dict(), indent=1))
    else:
        show_judgement(judgement)
    if out is None:
        return
    from unsoft.lab.interpret.steering.report import write

    directions.save(out / "directions.safetensors")
    again = shlex.join(["unsoft", *sys.argv[1:]])
    for path in (out / "directions.safetensors", *write(out, model, judgement, again)):
        typer.echo(str(path), err=as_json)
