"""The page, in a real browser: mouse, keyboard, two widths, two themes, and hostile words."""

import json
from dataclasses import replace

import pytest

from tests.lab.interpret.neurons.planted import (
    FREQUENCY_NEURON,
    NULL,
    NULL_NEURON,
    counts,
    planted_model,
    text,
)
from unsoft.lab.interpret.neurons import scan
from unsoft.lab.interpret.neurons.page import neurons_page

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def result():
    result = scan(planted_model(), text(), counts=counts(), null=NULL)
    result.details[NULL_NEURON]["tokens"][0]["token"] = HOSTILE
    return replace(result, model=HOSTILE)


@pytest.fixture(scope="module")
def file(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "neurons.html"
    path.write_text(neurons_page(result))
    return path


def shown(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)}).textContent")


@pytest.mark.parametrize(("width", "scheme"), [(420, "dark"), (1600, "light")])
def test_it_opens_without_network_complaint_or_sticking_out(browser, file, width, scheme):
    browser.open(file, width, scheme=scheme)
    assert browser.requests == [file.as_uri()] and browser.complaints == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert shown(browser, "#chosen-title") == f"Neuron {NULL_NEURON}: entropy"
    assert browser.run("document.querySelectorAll('#plane-frame circle').length") == 240
    assert browser.run("document.querySelectorAll('#tokens tr').length") == 8
    assert HOSTILE in shown(browser, "#tokens")
    assert browser.run("document.querySelectorAll('main img').length") == 0


def test_a_click_and_the_keyboard_choose_a_neuron(browser, file):
    browser.open(file)
    browser.run(
        f"document.querySelector('circle[data-key=\"{FREQUENCY_NEURON}\"]').dispatchEvent(new"
        f" MouseEvent('click', {{bubbles: true}}))"
    )
    assert shown(browser, "#chosen-title") == f"Neuron {FREQUENCY_NEURON}: frequency"
    assert browser.run("document.querySelector('circle.now').dataset.key") == str(FREQUENCY_NEURON)
    browser.run("document.querySelector('#neuron').focus()")
    browser.press("ArrowDown")
    assert shown(browser, "#chosen-title") != f"Neuron {FREQUENCY_NEURON}: frequency"
    browser.click("tr[data-key]")
    assert shown(browser, "#chosen-title").startswith("Neuron ")


def test_every_plane_can_be_drawn(browser, file):
    browser.open(file)
    planes = browser.run("[...document.querySelector('#plane').options].map((option) => option.value)")
    assert len(planes) == 6
    for plane in planes:
        browser.run(
            f"(() => {{const plane = document.querySelector('#plane'); plane.value = {json.dumps(plane)};"
            " plane.dispatchEvent(new Event('change'))})()"
        )
        places = browser.run(
            "[...document.querySelectorAll('#plane-frame circle')].map((c) => [+c.getAttribute('cx'),"
            " +c.getAttribute('cy')])"
        )
        assert all(0 <= x <= 640 and 0 <= y <= 460 for x, y in places)
        assert browser.run("document.querySelectorAll('#plane-frame rect').length") == plane.endswith(
            (" mediated_share", "frequency_share")
        )
    assert browser.complaints == []
