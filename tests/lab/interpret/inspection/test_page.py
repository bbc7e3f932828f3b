"""The page, in a real browser: mouse, keyboard, two widths, two themes, and hostile words."""

import json
import math
from dataclasses import replace

import pytest
import torch

from tests.lab.interpret.inspection.test_inspect import Letters
from tests.lab.interpret.inspection.tiny import tiny
from tests.lab.report.test_escape import PAYLOADS, Reader
from unsoft.lab.interpret.inspection import inspect
from unsoft.lab.interpret.inspection.page import find_patterns, inspection_page, most_interesting

SENTENCES = ["attention", "beyondsoftmaxbeyondsoftmaxbeyond"]


@pytest.fixture(scope="module")
def inspected():
    return inspect(tiny("llama"), SENTENCES, tokenizer=Letters())


@pytest.fixture(scope="module")
def patterns():
    return find_patterns(tiny("llama"), SENTENCES, Letters())


@pytest.fixture(scope="module")
def file(inspected, patterns, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "inspection.html"
    path.write_text(inspection_page(inspected, patterns))
    return path


def text(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)}).textContent")


def test_it_opens_without_network_or_complaint(browser, file):
    browser.open(file)
    assert browser.requests == [file.as_uri()]
    assert browser.complaints == []


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_sticks_out_sideways(browser, file, width):
    browser.open(file, width)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(
        "getComputedStyle(document.querySelector('.both')).gridTemplateColumns.split(' ').length"
    ) == (1 if width == 400 else 2)


def test_light_and_dark_differ_and_can_be_read(browser, file):
    """The contrast of text is at least 7 : 1 in both, that of quiet text 4.5 : 1."""

    def luminance(colour):
        parts = [int(x) / 255 for x in colour.removeprefix("rgb(").removesuffix(")").split(", ")]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grounds = []
    for scheme in ("light", "dark"):
        browser.open(file, scheme=scheme)
        ground, ink, quiet = (
            luminance(browser.run(f"getComputedStyle(document.querySelector('{where}')).{what}"))
            for where, what in (("body", "backgroundColor"), ("body", "color"), ("header .quiet", "color"))
        )
        grounds.append(ground)
        for colour, least in ((ink, 7), (quiet, 4.5)):
            assert (max(ground, colour) + 0.05) / (min(ground, colour) + 0.05) >= least
    assert grounds[0] > 0.9 > 0.1 > grounds[1]


def test_the_map_has_a_button_for_every_head_coloured_by_the_measure(browser, file, inspected):
    browser.open(file)
    assert browser.run("document.getElementById('measure').value") == most_interesting(inspected)[1]
    browser.run(
        "(() => {const m = document.getElementById('measure'); m.value = 'sink_share';"
        " m.dispatchEvent(new Event('change'))})()"
    )
    shades = browser.run(
        "[...document.querySelectorAll('#map button')].map((b) => [b.dataset.key,"
        " Number(b.style.getPropertyValue('--v')), b.title])"
    )
    values = [head["sink_share"] for head in inspected.heads]
    low, high = min(values), max(values)
    assert [shade[0] for shade in shades] == [f"{head['layer']}.{head['head']}" for head in inspected.heads]
    for (_, shade, title), value in zip(shades, values, strict=True):
        assert shade == pytest.approx((value - low) / (high - low), abs=2e-3)
        assert title.startswith("layer ") and f"sink share {value:.3f}" in title


def test_another_measure_colours_the_map_anew(browser, file, inspected):
    browser.open(file)
    browser.run(
        "(() => {const m = document.getElementById('measure'); m.value = 'hijack_excess';"
        " m.dispatchEvent(new Event('change'))})()"
    )
    largest = max(abs(head["hijack_excess"]) for head in inspected.heads)
    for head in inspected.heads:
        button = f"document.querySelector('#map button[data-key=\"{head['layer']}.{head['head']}\"]')"
        assert browser.run(f"{button}.title").startswith(
            f"layer {head['layer']} head {head['head']}, hijack excess "
        )
        assert browser.run(f"{button}.classList.contains('below')") == (head["hijack_excess"] < 0)
        shade = float(browser.run(f"{button}.style.getPropertyValue('--v')"))
        assert shade == pytest.approx(abs(head["hijack_excess"]) / largest if largest else 0, abs=2e-3)


def shown_weights(browser):
    """Numbers in the titles of the squares."""
    titles = browser.run("[...document.querySelectorAll('#pattern i')].map((i) => i.title)")
    return [float(title.rpartition(": ")[2]) for title in titles]


def test_a_click_on_a_head_shows_its_pattern_with_the_tokens(browser, file, patterns):
    browser.open(file)
    browser.click('#map button[data-key="1.3"]')
    assert text(browser, "#chosen-title") == "Layer 1, head 3"
    tokens = patterns[0].tokens
    assert browser.run("[...document.querySelectorAll('#pattern b.row')].map((b) => b.textContent)") == tokens
    assert (
        browser.run("[...document.querySelectorAll('#pattern b.column')].map((b) => b.textContent)") == tokens
    )
    wanted = patterns[0].layers[1][3].flatten().tolist()
    assert max(abs(a - b) for a, b in zip(shown_weights(browser), wanted, strict=True)) < 0.01


def test_another_sentence_and_another_token(browser, file, patterns):
    browser.open(file)
    browser.run(
        "(() => {const s = document.getElementById('sentence'); s.value = '1';"
        " s.dispatchEvent(new Event('change'))})()"
    )
    tokens = patterns[1].tokens
    assert len(tokens) == 32
    assert browser.run("[...document.querySelectorAll('.token')].map((b) => b.textContent)") == tokens
    browser.click(".token:nth-child(5)")
    row = patterns[1].layers[0][0][4]
    assert text(browser, "#told").startswith(
        f"“{tokens[4]}” (position 4) attends most to “{tokens[int(row.argmax())]}”"
    )
    assert browser.run("document.querySelector('.token:nth-child(5)').getAttribute('aria-pressed')") == "true"


def focused(browser):
    return browser.run(
        "(document.activeElement.dataset.key || document.activeElement.id ||"
        " document.activeElement.textContent)"
    )


def test_the_keyboard_reaches_everything(browser, file):
    browser.open(file)
    reached = []
    for _ in range(60):
        browser.press("Tab")
        reached.append(focused(browser))
    places = [reached.index(name) for name in ("measure", "0.0", "sentence")]
    assert places == sorted(places)
    assert sum(name in reached for name in ("<s>", "a", "t", "</s>")) == 4, "tokens are reached"
    assert any(name.strip() == "layer" for name in reached), "heads of tables are reached"
    assert "1.3" not in reached, "inside the map arrows lead on"


def test_arrows_walk_the_map(browser, file):
    browser.open(file)
    browser.run("document.querySelector('#map button').focus()")
    for key, expected in (
        ("ArrowRight", "0.1"),
        ("ArrowDown", "1.1"),
        ("ArrowDown", "1.1"),
        ("ArrowLeft", "1.0"),
        ("ArrowLeft", "1.0"),
        ("ArrowUp", "0.0"),
    ):
        browser.press(key)
        assert focused(browser) == expected
    assert text(browser, "#chosen-title") == "Layer 0, head 0"


@pytest.mark.parametrize("key", ["Enter", " "])
def test_tables_are_sorted_by_mouse_and_keyboard(browser, file, inspected, key):
    browser.open(file)
    last = "document.querySelector('section[aria-labelledby=all] table')"
    column = browser.run(
        f"[...{last}.tHead.rows[0].cells].findIndex((c) => c.textContent.trim() === 'entropy')"
    )

    def order():
        return browser.run(f"[...{last}.tBodies[0].rows].map((r) => Number(r.cells[{column}].dataset.value))")

    wanted = sorted((head["entropy"] for head in inspected.heads), reverse=True)
    browser.run(f"{last}.tHead.rows[0].cells[{column}].querySelector('button').focus()")
    browser.press(key)
    assert order() == pytest.approx(wanted)
    assert browser.run(f"{last}.tHead.rows[0].cells[{column}].getAttribute('aria-sort')") == "descending"
    browser.press(key)
    assert order() == pytest.approx(wanted[::-1])


def test_a_click_on_a_row_of_a_table_chooses_its_head(browser, file):
    browser.open(file)
    browser.click('section[aria-labelledby=all] tr[data-key="1.2"] td')
    assert text(browser, "#chosen-title") == "Layer 1, head 2"


class Hostile(Letters):
    """Every token is a payload."""

    def decode(self, ids, clean_up_tokenization_spaces):
        return PAYLOADS[ids[0] % len(PAYLOADS)]


def hostile_page(sentences):
    model = tiny("llama")
    inspected = replace(
        inspect(model, sentences, tokenizer=Hostile()), model=PAYLOADS[0] + PAYLOADS[1], skipped=PAYLOADS[:4]
    )
    patterns = [
        replace(p, text=PAYLOADS[k]) for k, p in enumerate(find_patterns(model, sentences, Hostile()))
    ]
    return inspection_page(inspected, patterns)


def test_hostile_tokens_make_no_elements(inspected, patterns):
    page = Reader(hostile_page(SENTENCES))
    allowed = set(Reader(inspection_page(inspected, patterns)).tags)
    assert set(page.tags) <= allowed and not [name for name, _ in page.attributes if name.startswith("on")]


def test_hostile_tokens_do_nothing_in_a_browser(browser, tmp_path):
    path = tmp_path / "hostile.html"
    path.write_text(hostile_page(SENTENCES))
    browser.open(path)
    for key in ("0.1", "1.3"):
        browser.click(f'#map button[data-key="{key}"]')
    assert browser.complaints == [] and browser.requests == [path.as_uri()]
    assert (
        browser.run(
            "document.querySelectorAll('main script, main img, main svg svg, #tokens > :not(button)').length"
        )
        == 0
    )
    assert browser.run("document.querySelectorAll('.token').length") > 5
    assert browser.run("document.documentElement.scrollWidth") <= 1600


def test_a_script_that_slipped_in_would_not_run(browser, tmp_path, inspected):
    """The policy itself, tried with a page whose escaping failed."""
    broken = inspection_page(inspected).replace(
        "<h1>",
        "<h1><script>document.title = 'broken'</script><img src=x onerror=\"document.title='broken'\">",
    )
    path = tmp_path / "broken.html"
    path.write_text(broken)
    browser.open(path)
    assert browser.run("document.title") != "broken"
    assert any("Content Security Policy" in line for line in browser.complaints)


def test_without_patterns_and_with_unknown_numbers(browser, tmp_path, inspected):
    path = tmp_path / "bare.html"
    heads = [head | ({"entropy": math.nan} if k == 2 else {}) for k, head in enumerate(inspected.heads)]
    path.write_text(inspection_page(replace(inspected, heads=heads)))
    browser.open(path)
    assert browser.complaints == []
    browser.click('#map button[data-key="0.2"]')
    assert "entropy–" in text(browser, "#numbers")


def test_signed_weights_are_shown_with_their_sign(browser, tmp_path):
    import unsoft

    model = unsoft.hf.swap(tiny("llama"), "cog")
    patterns = find_patterns(model, SENTENCES[:1], Letters())
    path = tmp_path / "cog.html"
    path.write_text(inspection_page(inspect(model, SENTENCES, tokenizer=Letters()), patterns))
    browser.open(path)
    browser.click('#map button[data-key="0.0"]')
    wanted = patterns[0].layers[0][0]
    assert (wanted < 0).any()
    signs = browser.run(
        "[...document.querySelectorAll('#pattern i')].map((i) => i.classList.contains('below'))"
    )
    clear = wanted.abs() > wanted.abs().max() / 100  # below that a byte may say 0
    assert (torch.tensor(signs).view_as(wanted) == (wanted < 0))[clear].all()


def test_it_opens_on_the_strongest_head_of_the_rarest_role(browser, inspected, patterns, tmp_path):
    heads = [dict(head, sink_share=0.1, hijack_excess=0.0, deletion_share=0.0) for head in inspected.heads]
    assert most_interesting(replace(inspected, heads=heads))[1] == "effective_keys"
    for head in heads[:3]:
        head["sink_share"] = 0.9
    heads[-1]["hijack_excess"] = 0.3
    told = replace(inspected, heads=heads)
    head, measure = most_interesting(told)
    assert head is heads[-1] and measure == "hijack_excess"
    (tmp_path / "page.html").write_text(inspection_page(told, patterns))
    browser.open(tmp_path / "page.html")
    assert text(browser, "#chosen-title") == f"Layer {head['layer']}, head {head['head']}"
    selected = "document.querySelector('#map button[aria-selected=true]')"
    assert browser.run(f"{selected}.dataset.key") == f"{head['layer']}.{head['head']}"
    assert "inset" in browser.run(f"getComputedStyle({selected}).boxShadow"), "no frame cuts it"


def test_what_is_lost_without_heads_has_a_table(browser, inspected, patterns, tmp_path):
    one = {"role": "sink", "heads": "0.1", "change": 0.25, "low": 0.1, "high": 0.4, "random": 0.01}
    one |= {"difference": 0.24, "difference_low": 0.1, "difference_high": 0.38, "verdict": "matters"}
    done = {"loss": 3.0, "tokens": 99, "sequences": 4, "draws": 6, "removed": [one]}
    path = tmp_path / "page.html"
    path.write_text(inspection_page(replace(inspected, ablation=done), patterns))
    browser.open(path)
    assert "+0.1000 to +0.4000" in text(browser, "section[aria-labelledby=ablation] table")
    assert "section[aria-labelledby=ablation]" and browser.complaints == []
