"""Whatever others wrote stays text, in a page as in a terminal."""

import json
from html.parser import HTMLParser

import pytest

from unsoft.lab.report import page as pages
from unsoft.lab.report.page import embedded_json, page, printable

PAYLOADS = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)",
    "<!-- --!><svg onload=alert(1)>",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.exe\u2066",
    "a\x00b\x1b[31mred\x07",
    "]]>&lt;b&gt;\u2028\u2029",
    "x" * 1_000_000,
]
TEMPLATE = """<h1>{{ text }}</h1><p title="{{ text }}">{{ text | printable }}</p>
{{ macros.table(text, [{"name": text, "title": text, "help": text}], [{text: text}], [text]) }}
{{ macros.line_chart(text, text, chart) }}"""


class Reader(HTMLParser):
    """Parse a page as a browser would."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.scripts, self.inside = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts.append(data)


def whole(tmp_path, text):
    from unsoft.lab.report.page import line_chart

    template = tmp_path / "template.html"
    template.write_text(TEMPLATE)
    return page(
        template,
        title=text,
        data={"text": text, text: [text]},
        text=text,
        chart=line_chart([0, 1], [1.0, 2.0], text),
    )


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda text: ascii(text[:20]))
def test_no_payload_becomes_markup(tmp_path, payload):
    harmless, tried = Reader(whole(tmp_path, "word")), Reader(whole(tmp_path, payload))
    assert tried.tags == harmless.tags, "an element was made of text"
    assert [name for name, _ in tried.attributes] == [name for name, _ in harmless.attributes]
    assert not [name for name, _ in tried.attributes if name.startswith("on") or name == "style"]
    assert json.loads(tried.scripts[0]) == {"text": payload, payload: [payload], "texts": {}}
    assert tried.scripts[1:] == harmless.scripts[1:]


def test_nothing_is_loaded_and_the_policy_names_the_only_script(tmp_path):
    import base64
    import hashlib

    text = whole(tmp_path, "word")
    read = Reader(text)
    assert not [
        value
        for name, value in read.attributes
        if name in ("src", "href") and value not in ("data:,", "#main")
    ]
    policy = (
        dict(read.attributes)["content"]
        if False
        else next(v for k, v in read.attributes if v and "default-src" in v)
    )
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    style = text.partition("<style>")[2].partition("</style>")[0]
    for content in (script, style):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" in policy


def test_a_name_that_a_template_does_not_get_is_an_error(tmp_path):
    from jinja2 import UndefinedError

    (tmp_path / "template.html").write_text("{{ missing }}")
    with pytest.raises(UndefinedError):
        page(tmp_path / "template.html", title="t", data={})


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda text: ascii(text[:20]))
def test_printable_text_is_short_and_moves_nothing(payload):
    shown = printable(payload)
    assert all(c.isprintable() for c in shown)
    assert len(printable(payload, 20)) <= 20 * 6


def test_json_has_no_way_out_and_no_strange_numbers():
    text = embedded_json({"a": [float("inf"), float("nan"), 1.5], "b": "</script><!--&\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": [None, None, 1.5], "b": "</script><!--&\u2028"}


def test_styles_and_scripts_of_the_package_cannot_end_their_element():
    for path in pages.HERE.parent.rglob("*.css"):
        assert "</" not in path.read_text(), path
    for path in pages.HERE.parent.rglob("*.js"):
        assert "</script" not in path.read_text() and "innerHTML" not in path.read_text(), path
