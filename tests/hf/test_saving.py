"""What is saved comes back bit for bit, and plain transformers never drops a mechanism in silence."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import safetensors.torch
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import unsoft
from unsoft.modules.plugins import unregister
from unsoft.modules.registry import names

OWN = unsoft.Formula(
    weight="s*exp(tau*s - m)", mass="abs(s)*exp(tau*s - m)", peak="tau*s", params={"tau": 1.0}
)
EVERY = [*names(), "gated+cog", "sink+softmax", "magnitude+linear-elu1", "first_last(softmax)+cog", OWN]


def stirred(model):
    """Parameters of the mechanisms moved from where they start, as training would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if ".unsoft." in name:
                x.add_(0.1 * torch.randn_like(x))
    return model


@pytest.mark.parametrize("mechanism", EVERY, ids=lambda x: x if isinstance(x, str) else "own")
def test_every_mechanism_comes_back_bit_for_bit(tiny, words, tmp_path, mechanism):
    model = stirred(unsoft.hf.swap(tiny("llama"), mechanism, layers={0: "softmax"}))
    model.save_pretrained(tmp_path)
    again = unsoft.hf.load(tmp_path)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert torch.equal(again(words).logits, model(words).logits)


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gemma2", "bert", "vit", "clip"])
def test_architectures_come_back(tiny, numbers, tmp_path, kind):
    model = stirred(unsoft.hf.swap(tiny(kind), "gated+cog"))
    model.save_pretrained(tmp_path)
    assert torch.equal(numbers(kind, unsoft.hf.load(tmp_path), "right"), numbers(kind, model, "right"))


def test_a_loaded_model_can_be_saved_loaded_and_swapped_again(tiny, words, tmp_path):
    model = stirred(unsoft.hf.swap(tiny("llama"), "magnitude+cog", where="mass"))
    model.save_pretrained(tmp_path / "one")
    unsoft.hf.load(tmp_path / "one").save_pretrained(tmp_path / "two")
    again, tokenizer = unsoft.hf.load_model(tmp_path / "two")
    assert tokenizer is None
    assert torch.equal(again(words).logits, model(words).logits)
    assert (unsoft.hf.swap(again, "softmax")(words).logits - tiny("llama")(words).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["llama", "clip"])
def test_no_way_of_loading_warns_of_the_model_type(tiny, tmp_path, monkeypatch, kind):
    """The classes of a loaded model and of its config read the folder, too: PEFT does when it saves."""
    warnings = []
    monkeypatch.setattr(transformers.configuration_utils.logger, "warning", warnings.append)
    unsoft.hf.swap(tiny(kind), "cog").save_pretrained(tmp_path)
    model = unsoft.hf.load(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for config in (again.config, type(model.config).from_pretrained(tmp_path)):
        assert config.model_type == kind and config.architectures == model.config.architectures
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    assert not warnings


def test_bfloat16_stays_bfloat16(tiny, words, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = stirred(unsoft.hf.swap(plain, OWN))
    model.save_pretrained(tmp_path)
    again = unsoft.hf.load(tmp_path)
    assert {x.dtype for x in again.parameters()} == {torch.bfloat16}
    assert torch.equal(again(words).logits, model(words).logits)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_keep_their_mechanisms(tiny, words, again):
    model = stirred(unsoft.hf.swap(tiny("llama"), "gated+linear-elu1"))
    twin = again(model)
    assert type(twin) is type(model)
    assert torch.equal(twin(words).logits, model(words).logits)
    next(x for name, x in twin.named_parameters() if ".unsoft." in name).data.add_(1.0)
    assert not torch.equal(twin(words).logits, model(words).logits)


def test_shards_come_back(tiny, words, tmp_path):
    model = stirred(unsoft.hf.swap(tiny("llama"), "gpam"))
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(unsoft.hf.load(tmp_path)(words).logits, model(words).logits)


def test_the_mechanism_stands_in_the_config(tiny, tmp_path):
    unsoft.hf.swap(tiny("llama"), "cog", keep_first_last=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["unsoft"]["mechanism"], config["unsoft"]["keep_first_last"]) == ("cog", True)
    assert config["model_type"] == "unsoft_llama"
    assert config["architectures"] == ["UnsoftLlamaForCausalLM"], "which vLLM and llama.cpp look at"
    again = unsoft.hf.load(tmp_path).config
    assert (again.model_type, again.architectures) == ("llama", ["LlamaForCausalLM"])


def test_plain_transformers_refuses_the_folder(tiny, tmp_path):
    """In a process without unsoft, also with another attention implementation requested, as
    TransformerLens does; a class that is named directly at least warns."""
    unsoft.hf.swap(tiny("llama"), "cog").save_pretrained(tmp_path)
    code = f"""
import transformers
for options in ({{}}, {{"attn_implementation": "eager"}}):
    for read in (transformers.AutoModelForCausalLM.from_pretrained, transformers.AutoModel.from_pretrained):
        try:
            read({str(tmp_path)!r}, **options)
        except ValueError as error:
            print("`unsoft_llama`" in str(error) and "does not recognize" in str(error))
try:
    transformers.pipeline("text-generation", model={str(tmp_path)!r})
except ValueError as error:
    print("`unsoft_llama`" in str(error))
try:
    transformers.LlamaForCausalLM.from_pretrained({str(tmp_path)!r})
except ValueError as error:
    print("unsoft" in str(error))
transformers.LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, attn_implementation="sdpa")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 6
    assert "unsoft_llama" in done.stderr
    assert "UNEXPECTED" in done.stderr and "unsoft.swapped" in done.stderr


@pytest.mark.parametrize("mechanism", ["cog", "gated+magnitude+softmax"])
def test_auto_classes_read_the_folder_once_unsoft_is_there(tiny, words, tmp_path, mechanism):
    model = stirred(unsoft.hf.swap(tiny("llama"), mechanism))
    model.save_pretrained(tmp_path)
    for auto, kind in (("AutoModelForCausalLM", "LlamaForCausalLM"), ("AutoModel", "LlamaModel")):
        again = getattr(transformers, auto).from_pretrained(tmp_path)
        assert type(again).__name__ == kind
        assert again.layers[0].self_attn.unsoft.label == mechanism if auto == "AutoModel" else True
    causal = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(causal(words).logits, model(words).logits)
    with pytest.raises(ValueError, match="would drop the mechanisms"):
        causal.set_attn_implementation("eager")


def test_asking_for_another_attention_at_loading_does_not_drop_the_mechanism(tiny, tmp_path):
    unsoft.hf.swap(tiny("llama"), "cog").save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert again.config._attn_implementation == "unsoft"


def test_other_models_of_the_same_kind_are_left_alone(tiny, words, tmp_path):
    plain = tiny("llama")
    unsoft.hf.swap(tiny("llama"), "cog").save_pretrained(tmp_path / "swapped")
    unsoft.hf.load(tmp_path / "swapped")
    plain.save_pretrained(tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["model_type"] == "llama"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(again) is transformers.LlamaForCausalLM
    assert torch.allclose(again(words).logits, plain(words).logits, atol=1e-5)


def test_folders_of_older_versions_are_read(tiny, words, tmp_path):
    """They had the usual type and architecture."""
    model = unsoft.hf.swap(tiny("llama"), "cog")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["unsoft"]["format"]
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(unsoft.hf.load(tmp_path)(words).logits, model(words).logits)
    with pytest.raises(ValueError, match=r"names no mechanism; .* unsoft.hf.load"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_registered_formula_is_stored_with_the_model(tiny, words, tmp_path):
    """Loading needs no registration, and another formula of that name changes nothing."""
    unsoft.register("mine", OWN)
    try:
        model = stirred(unsoft.hf.swap(tiny("llama"), "gated+mine", layers={0: "mine"}))
        model.save_pretrained(tmp_path)
        expected = model(words).logits
    finally:
        unregister("mine")
    again = unsoft.hf.load(tmp_path)
    assert torch.equal(again(words).logits, expected)
    assert [layer.self_attn.unsoft.label for layer in again.model.layers] == ["mine", "gated+mine"]
    unsoft.register("mine", unsoft.Formula("s/n"))
    try:
        assert torch.equal(unsoft.hf.load(tmp_path)(words).logits, expected)
    finally:
        unregister("mine")


def test_a_config_of_a_newer_version_is_refused(tiny, tmp_path):
    unsoft.hf.swap(tiny("llama"), "cog").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["unsoft"] |= {"format": 99, "version": "9.1"}
    file.write_text(json.dumps(config))
    for read in (unsoft.hf.load, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"saved by unsoft 9\.1 in a format .* pip install -U unsoft"):
            read(tmp_path)


def test_the_model_card_says_what_the_model_is_and_what_to_install(tiny, tmp_path):
    tiny("llama").save_pretrained(tmp_path / "small")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "small", attn_implementation="unsoft:cog"
    )
    model.save_pretrained(tmp_path / "one")
    unsoft.hf.load(tmp_path / "one").save_pretrained(tmp_path / "two")
    for folder in ("one", "two"):
        card = (tmp_path / folder / "README.md").read_text()
        for text in ("# small with cog attention", "pip install 'unsoft[hf]'", "sign(s)*exp(abs(s) - m)"):
            assert text in card
        assert str(tmp_path) not in card
    own = tmp_path / "one" / "README.md"
    own.write_text("my own card")
    model.save_pretrained(tmp_path / "one")
    assert own.read_text() == "my own card"


def test_a_card_that_cannot_be_written_is_one_warning(tiny, words, tmp_path):
    (tmp_path / "README.md").mkdir()
    model = unsoft.hf.swap(tiny("llama"), "cog")
    with pytest.warns(UserWarning, match="the model is saved, but its card .*README.md' cannot be written"):
        model.save_pretrained(tmp_path)
    assert torch.equal(unsoft.hf.load(tmp_path)(words).logits, model(words).logits)


def test_a_damaged_folder_is_refused(tiny, tmp_path):
    unsoft.hf.swap(tiny("llama"), "gpam").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    whole = file.read_text()
    for section in ({"format": 1}, "text"):
        file.write_text(json.dumps(json.loads(whole) | {"unsoft": section}))
        with pytest.raises(ValueError, match="section 'unsoft' of config.json is damaged"):
            unsoft.hf.load(tmp_path)
    file.write_text(whole[:40])
    with pytest.raises(ValueError, match=r"config.json' is damaged"):
        unsoft.hf.load(tmp_path)
    file.write_text(whole)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.layers.0.self_attn.unsoft.mechanism.plus"]
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"is damaged: missing keys .*mechanism.plus"):
        unsoft.hf.load(tmp_path)


def test_what_was_not_swapped_is_not_loaded(tiny, tmp_path):
    with pytest.raises(ValueError, match="is not a folder with a model"):
        unsoft.hf.load(tmp_path / "nothing")
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was not saved after unsoft.hf.swap"):
        unsoft.hf.load(tmp_path)


class Rewritten(torch.nn.Module):
    """Attention of another package around the model's own module, as TransformerLens' bridge does it."""

    def __init__(self, original):
        super().__init__()
        self.original = original

    def forward(self, hidden_states, *args, **options):
        return hidden_states, None


def test_attention_that_a_tool_puts_in_its_place_is_refused(tiny, words):
    model = unsoft.hf.swap(tiny("llama"), "cog")
    layer = model.model.layers[1]
    kept = layer.self_attn
    layer.self_attn = Rewritten(kept)
    with pytest.raises(ValueError, match="LlamaDecoderLayer.self_attn .* replaced by a Rewritten"):
        model(words)
    with pytest.raises(ValueError, match="replaced by a Rewritten"):
        copy.deepcopy(model).generate(words, max_new_tokens=1, pad_token_id=0)
    layer.self_attn = kept
    model(words)


def test_wrappers_that_run_what_is_inside_stay(tiny, words):
    model = unsoft.hf.swap(tiny("llama"), "cog")
    expected, layer = model(words).logits, model.model.layers[1]
    layer.self_attn = checkpoint_wrapper(layer.self_attn)
    assert torch.equal(model(words).logits, expected)
