"""``unsoft steer``: push a model along a direction inside it, and test whether the effect is real."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsoft.cli import arguments
from unsoft.cli.arguments import AsJson, LanguageModel, path_option, read_text, unset, wrong
from unsoft.cli.terminal import console, print_json, progress, show_table

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

_LISTS = ("positive", "negative", "prompts", "toward", "away", "other_positive", "other_negative")
_FILES = [f"{name}.txt" for name in (*_LISTS, "unrelated")]
Positive = Annotated[Path | None, unset("Texts with the property, one per line; default: happy sentences.")]
Negative = Annotated[
    Path | None, unset("Texts without the property; each line is the counterpart of one in --positive.")
]
Method = Annotated[str, typer.Option(help="mean, pca or probe.")]
Layers = Annotated[
    str | None, unset("Layers, such as 3, 4-7 or 0,8-; default: the middle third.", "--only-layers")
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
    model: LanguageModel,
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
    arguments.check_file(out)
    from unsoft.lab.interpret import steering

    network, tokenizer = load(model)
    directions = steering.fit(
        network, *halves, tokenizer, method=method, layers=listed(layers), site=site, pool=pool
    )
    directions.save(out)
    norms = directions.norms()
    if as_json:
        print_json({"file": str(out), "method": method, "site": site, "norms": norms})
        return
    columns = dict.fromkeys(("layer", "length of the direction"), "right")
    show_table(columns, [[layer, f"{norm:.3g}"] for layer, norm in norms.items()], box=False)
    typer.echo(str(out))


@command.command()
def generate(
    model: LanguageModel,
    directions: Annotated[Path, typer.Argument(help="File that unsoft steer fit wrote.")],
    prompt: Annotated[list[str], typer.Option(help="Text to continue; may be repeated.")],
    strength: Strength = 1.0,
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

    screen, where, results = console(), read_positions(positions), []
    for text in prompt:
        plain = continued(text)
        with steering(network, loaded, strength, positions=where, keep_norm=keep_norm):
            steered = continued(text)
        results.append({"prompt": text, "unsteered": plain, "steered": steered})
        if not as_json:
            screen.print(f"prompt    {printable(text, 200)}")
            screen.print(f"unsteered {printable(plain, 2000)}")
            screen.print(f"steered   {printable(steered, 2000)}")
    if as_json:
        print_json(results)


@command.command()
def check(
    model: LanguageModel,
    examples: Annotated[Path | None, unset(f"Folder with {', '.join(_FILES)}; default: built in.")] = None,
    method: Method = "mean",
    layers: Layers = None,
    site: Site = "block",
    pool: Pool = "last",
    strength: Strength = 0.1,
    positions: Positions = "all",
    keep_norm: KeepNorm = False,
    out: Annotated[
        Path | None, path_option("Write table, verdict, directions and a page here.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test whether steering is a real intervention: one table of controls, with rules fixed in advance.

    The built-in examples are happy and unhappy sentences, with past and future as the other task.

    \b
    Examples:
      unsoft steer check smollm2
      unsoft steer check smollm2 --examples mine --strength 0.2 --out steering
    """
    from unsoft.lab.interpret.steering.controls import TextExamples, check_text, steps, write

    lists = {name: lines(_example(examples, name)) for name in _LISTS}
    other = lists.pop("other_positive"), lists.pop("other_negative")
    texts = TextExamples(**lists, other=other, unrelated=_example(examples, "unrelated"))
    if out is not None:
        arguments.check_drawing()
        arguments.prepare_folder(out)
    network, tokenizer = load(model)
    with progress(steps(bounds=1)) as bar:
        count = iter(range(steps(bounds=1)))
        directions, judgement = check_text(
            network,
            tokenizer,
            texts,
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
        print_json(judgement.to_dict())
    else:
        show_judgement(judgement)
    if out is None:
        return
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


def lines(text: str) -> list[str]:
    """Return the lines of a text that are not empty."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _example(folder: Path | None, name: str) -> str:
    """Read NAME.txt from a folder of examples; None is the built-in one."""
    from unsoft.lab.interpret import inspection, steering

    if folder is None and name == "unrelated":
        return read_text(Path(inspection.__file__).parent / "sample.txt", "'--examples'")
    folder = Path(steering.__file__).parent / "sample" if folder is None else folder
    return read_text(folder / f"{name}.txt", "'--examples'")


def pairs(positive: Path | None, negative: Path | None) -> tuple[list[str], list[str]]:
    """Read texts with a property and their counterparts without it."""
    if positive is None and negative is None:
        return lines(_example(None, "positive")), lines(_example(None, "negative"))
    if positive is None or negative is None:
        raise typer.BadParameter("--positive and --negative belong together")
    return lines(read_text(positive, "'--positive'")), lines(read_text(negative, "'--negative'"))


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
        raise wrong(f"{model} is not a language model with a tokenizer", "'MODEL'")
    return network, tokenizer
