"""One look per mechanism, whatever the subset; lines that coincide are found and seen in turns."""

import itertools

import pytest

from unsoft.lab.compare.section import STANDARD
from unsoft.lab.report.figure import Figure, by_mechanism
from unsoft.lab.report.look import coinciding, in_turns, look_of, page_looks
from unsoft.mechanisms import mechanisms
from unsoft.modules.registry import modifiers


def test_no_two_mechanisms_look_alike():
    names = [*mechanisms(), *(f"{modifier.name}+softmax" for modifier in modifiers())]
    names += [name for name in STANDARD.mechanisms if name not in names]
    seen = {}
    for name in names:
        assert seen.setdefault(look_of(name), name) == name, "add it to the end of the list in look.py"


def test_the_best_known_have_a_colour_and_a_mark_each():
    first = [look_of(name) for name in ("softmax", "cog", "relu2", "sigmoid", "gpam", "magnitude")]
    assert len({look.colour for look in first}) == len({look.mark for look in first}) == len(first)


def test_mechanisms_on_one_page_differ_in_colour():
    labels = ["softmax", "softpick", "magnitude+softmax", "cog", "softmax1", "magnitude", "mine"]
    found = page_looks(labels)
    assert len({look.colour for look in found.values()}) == len(labels)
    assert all(found[name] == look_of(name) for name in ("softmax", "cog", "magnitude"))
    every = page_looks(STANDARD.mechanisms)
    assert len(set(every.values())) == len(every)


def test_a_figure_has_the_looks_of_its_page():
    rows = [{"mechanism": name, "x": x, "y": x + k} for k, name in enumerate(("cog", "tanh")) for x in (0, 1)]
    axes = {"x_title": "x", "y_title": "y"}
    alone = by_mechanism(["tanh"], rows[2:], "x", "y", **axes).to_dict(validate=False)
    beside = by_mechanism(["cog", "tanh"], rows, "x", "y", **axes).to_dict(validate=False)

    def looks(spec):
        drawn = {}
        for layer in spec["layer"]:
            for channel in ("color", "shape"):
                scale = layer["encoding"].get(channel, {"scale": {"domain": []}})["scale"]
                drawn |= {
                    (channel, name): value
                    for name, value in zip(scale["domain"], scale.get("range", []), strict=True)
                }
        return drawn

    for spec, labels in ((alone, ["tanh"]), (beside, ["cog", "tanh"])):
        look = page_looks(labels)["tanh"]
        assert looks(spec)["color", "tanh"] == look.colour and looks(spec)["shape", "tanh"] == look.mark


def lines(**slopes):
    return [
        {"mechanism": name, "x": x, "beta": beta, "y": slope * x * (beta + 2)}
        for name, slope in slopes.items()
        for beta in (-1.0, 0.0)
        for x in (1.0, 2.0, 3.0)
    ]


def test_lines_coincide_within_a_pixel_or_so_and_no_further():
    assert coinciding(lines(a=1, b=1.001, c=2), "x", "y", choose=["beta"]) == {
        "beta=-1": [["a", "b"]],
        "beta=0": [["a", "b"]],
    }
    assert coinciding(lines(a=1, b=1.1, c=2), "x", "y", choose=["beta"]) == {}
    half = [row for row in lines(a=1, b=1) if row["mechanism"] == "a" or row["x"] < 3]
    assert coinciding(half, "x", "y", choose=["beta"]) == {}, "a line that ends earlier is another line"


@pytest.mark.parametrize("count", [2, 3, 5])
def test_in_turns_every_place_of_a_line_shows_exactly_one(count):
    period = sum(in_turns(0, count))

    def drawn(dash):
        ends = list(itertools.accumulate(dash))
        return [k for k in range(period) if next(i for i, end in enumerate(ends) if k < end) % 2 == 0]

    places = [place for k in range(count) for place in drawn(in_turns(k, count))]
    assert sorted(places) == list(range(period))


def test_a_picture_says_its_setting_and_which_lines_are_one():
    rows = lines(softmax=1, cog=1, relu=2)
    chart = by_mechanism(
        ["softmax", "cog", "relu"], rows, "x", "y", x_title="x", y_title="y", choose={"beta": 0.0}
    )
    spec = Figure("f", "Title", "With 7 keys.", rows, chart).for_file()
    assert spec["title"]["text"] == "Title"
    assert spec["title"]["subtitle"] == ["With 7 keys.", "On one line, in turns: softmax = cog."]
    dashes = next(param["value"] for param in spec["params"] if param["name"] == "dashes")
    assert dashes[:2] == [in_turns(0, 2), in_turns(1, 2)] and tuple(dashes[2]) == look_of("relu").dash
