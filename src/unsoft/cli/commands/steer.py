"""``unsoft steer``: push a model along a direction inside it, and test whether the effect is real."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsoft.cli.arguments import AsJson, check_file, path_option, prepare_folder, read_text
from unsoft.cli.completion import complete_model
from unsoft.cli.terminal import console, progress, show_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from unsoft.lab.interpret.steering.controls import Judgement

command = typer.Typer(
    help="""Steer a model along directions, with control tests.

    \b
    Examples:
      unsoft steer check smollm2
      unsoft steer fit smollm2 --out joy.safetensors
    """,
    rich_markup_mode=None,
)

Model = Annotated[
    str, typer.Argument(help="smollm2, a folder, or a name on the hub.", autocompletion=complete_model)
]
Positive = Annotated[
    Path | None,
    typer.Option(help="Texts with the property, one per line; default: built-in pairs.", show_default=False),
]
Negative = Annotated[
    Path | None,
    typer.Option(
        help="Texts without the property; each line is the counterpart of one in --positive.",
        show_default=False,
    ),
]
Method = Annotated[str, typer.Option(help="mean, pca or probe.")]
Layers = Annotated[
    str | None,
    typer.Option(
        "--only-layers",
        help="Layers, such as 3, 4-7 or 0,8-; default: the middle third.",
        show_default=False,
    ),
]
Site = Annotated[str, typer.Option(help="What to steer: the output of a block, or that of its mlp.")]
Pool = Annotated[str, typer.Option(help="State of a text: last (that of its last token), or mean.")]
Strength = Annotated[float, typer.Option(help="Strength; 1 is the distance between the two kinds of texts.")]
Positions = Annotated[
    str, typer.Option(help="Tokens to steer: all, prompt, generated, or numbers such as 0,-1.")
]
KeepNorm = Annotated[bool, typer.Option("--keep-norm", help="Rotate states and keep their length.")]


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
    """Fit directions to pairs of texts and write them to a file.

    \b
    Examples:
      unsoft steer fit smollm2 --out joy.safetensors
      unsoft steer fit smollm2 --positive a.txt --negative b.txt --out mine.safetensors
    """
    halves = pairs(positive, negative)
    check_file(out)
    from unsoft.lab.interpret import steering

    network, tokenizer = load(model)
    directions = steering.fit(
        network, *halves, tokenizer, method=method, layers=listed(layers), site=site, pool=pool
    )
    directions.save(out)
    norms = directions.norms()
    if as_json:
        about = {"file": str(out), "method": method, "site": site, "norms": norms}
        typer.echo(json.dumps(about, indent=1))
        return
    show_table(
        {"layer": "right", "length of the direction": "right"},
        [[layer, f"{norm:.3g}"] for layer, norm in norms.items()],
        box=False,
    )
    typer.echo(str(out))


@command.command()
def generate(
    model: Model,
    directions: Annotated[Path, typer.Argument(help="File that unsoft steer fit wrote.")],
    prompt: Annotated[list[str], typer.Option(help="Text to continue; may be repeated.")],
    strength: Strength = 1.0,
    layers: Layers = None,
    positions: Positions = "all",
    keep_norm: KeepNorm = False,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 40,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt unsteered and steered, taking the most likely token at each step.

    \b
    Examples:
      unsoft steer generate smollm2 joy.safetensors --prompt "The weather is"
      unsoft steer generate smollm2 joy.safetensors --prompt "Today I" --strength 0.5 --tokens 20
    """
    from unsoft.lab.interpret.steering import Directions, steering
    from unsoft.lab.interpret.steering.fit import encoded
    from unsoft.lab.report.page import printable

    loaded = Directions.load(directions)
    network, tokenizer = load(model)
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    if network.generation_config is not None and network.generation_config.pad_token_id is None:
        options["pad_token_id"] = tokenizer.eos_token_id

    def continued(text: str) -> str:
        inputs = encoded(text, tokenizer, network)
        written = network.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]  # type: ignore[operator]
        return str(tokenizer.decode(written, skip_special_tokens=True))

    screen, results = console(), []
    for text in prompt:
        plain = continued(text)
        where: dict[str, Any] = {"layers": listed(layers), "positions": read_positions(positions)}
        with steering(network, loaded, strength, **where, keep_norm=keep_norm):
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
            help="Held-out prompts to measure on, not used to fit the direction.", show_default=False
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
        Path | None, typer.Option(help="Text that steering should not change.", show_default=False)
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
        path_option("Write table, verdict, directions and a page to this folder.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test whether steering is a real intervention: one table of controls, with rules fixed in advance.

    Without files: built-in pairs of happy and unhappy sentences, with past and future as the other task.

    \b
    Examples:
      unsoft steer check smollm2
      unsoft steer check smollm2 --strength 0.2 --out steering
    """
    from unsoft.lab.interpret.steering.controls import TextExamples, check_text

    examples = TextExamples(
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
            examples,
            method=method,
            layers=listed(layers),
            site=site,
            pool=pool,
            strength=strength,
            positions=read_positions(positions),
            keep_norm=keep_norm,
            progress=lambda step: bar(next(count), step, step),
        )
    if as_json:
        typer.echo(json.dumps(judgement.to_dict(), indent=1))
    else:
        show_judgement(judgement)
    if out is None:
        return
    from unsoft.lab.interpret.steering.controls import write

    directions.save(out / "directions.safetensors")
    again = shlex.join(["unsoft", *sys.argv[1:]])
    for path in (out / "directions.safetensors", *write(out, model, judgement, again)):
        typer.echo(str(path), err=as_json)


def show_judgement(judgement: Judgement) -> None:
    """Print the table of controls and the verdict."""
    columns = {"control": "whole", "effect": "right", "interval": "whole", "passed": "left", "rule": "left"}
    rows = [
        [
            control.name,
            f"{control.effect:+.3f}",
            f"{control.low:+.3f} to {control.high:+.3f}",
            "yes" if control.passed else "NO",
            control.rule,
        ]
        for control in judgement.controls
    ]
    show_table(columns, rows, box=False)
    typer.echo(f"{judgement.verdict}: {judgement.summary()}")


def pairs(positive: Path | None, negative: Path | None, kind: str = "") -> tuple[list[str], list[str]]:
    """Read texts with a property and their counterparts without it."""
    if (positive is None) != (negative is None):
        option = f"--{kind.replace('_', '-')}"
        raise typer.BadParameter(f"{option}positive and {option}negative belong together")
    return lines(positive, f"{kind}positive"), lines(negative, f"{kind}negative")


def lines(path: Path | None, name: str) -> list[str]:
    """Read the lines that are not empty, from the built-in sample if there is no file."""
    from unsoft.lab.interpret import steering

    sample = Path(steering.__file__).parent / "sample" / f"{name}.txt"
    text = read_text(path or sample, f"'--{name.replace('_', '-')}'")
    return [line.strip() for line in text.splitlines() if line.strip()]


def prose(path: Path | None) -> str:
    """Read the text that steering should not change."""
    from unsoft.lab.interpret import inspection

    return read_text(path or Path(inspection.__file__).parent / "sample.txt", "'--unrelated'")


def listed(layers: str | None) -> list[str] | None:
    """Split "0,8-" into a list.

    >>> listed("0, 8-")
    ['0', '8-']
    """
    return None if layers is None else [part.strip() for part in layers.split(",")]


def read_positions(positions: str) -> str | list[int]:
    """Return token numbers as a list, and other text unchanged.

    >>> read_positions("0,-1"), read_positions("all")
    ([0, -1], 'all')
    """
    try:
        return [int(part) for part in positions.split(",")]
    except ValueError:
        return positions


def load(model: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a language model and its tokenizer."""
    from unsoft.hf.models import load_model

    network, tokenizer = load_model(model)
    if tokenizer is None or not network.can_generate():
        raise typer.BadParameter(
            f"{model} is no language model with a tokenizer, so it cannot be steered with texts",
            param_hint="'MODEL'",
        )
    return network, tokenizer
