"""Inputs of ``inspect``, unsupported models, and blocks of rows."""

import types

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, T5Config, T5EncoderModel, T5ForConditionalGeneration

import unsoft
from tests.lab.interpret.inspection.tiny import GROUPED, reading, tiny
from unsoft.lab.interpret.inspection import inspect, sequence
from unsoft.lab.interpret.models import batches


class Letters:
    """A tokenizer for lower-case letters that puts 1 before and 2 behind every sequence."""

    pad_token_id = 0

    def __call__(self, texts, truncation, max_length, return_overflowing_tokens):
        rows = []
        for text in texts:
            ids = [ord(c) - 94 for c in text]
            rows += [[1, *ids[at : at + max_length - 2], 2] for at in range(0, len(ids), max_length - 2)]
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}

    def decode(self, ids, clean_up_tokenization_spaces):
        return "".join({1: "<s>", 2: "</s>"}.get(number, chr(number + 94)) for number in ids)


def close(one, two):
    for first, second in zip(one.heads, two.heads, strict=True):
        for name, value in first.items():
            assert value == (
                second[name] if isinstance(value, str) else pytest.approx(second[name], abs=1e-4)
            ), name


def test_it_is_public():
    assert unsoft.lab.interpret.inspect is inspect


def test_texts_tokens_and_batches_give_the_same():
    model, text = tiny("llama"), "hello"
    ids = torch.tensor([[1, *(ord(c) - 94 for c in text), 2]])
    from_text = inspect(model, text, tokenizer=Letters())
    close(inspect(model, ids, tokenizer=Letters()), from_text)
    close(inspect(model, {"input_ids": ids, "labels": ids}, tokenizer=Letters()), from_text)
    assert (from_text.sequences, from_text.tokens) == (1, 7)


def test_the_size_of_a_batch_changes_nothing():
    texts = ["abcabcabc", "attention", "xyz", "aaaaaaaaaaaaaaaa", "some words", "no"]
    texts = [text.replace(" ", "") for text in texts]
    model = tiny("llama")
    report = [inspect(model, texts, tokenizer=Letters(), batch_size=size) for size in (1, 4, 6)]
    close(report[1], report[0])
    close(report[2], report[0])


def test_long_texts_are_cut_and_the_first_sequences_kept():
    model = tiny("llama")
    report = inspect(model, "abcdefghijklmnop", tokenizer=Letters(), max_length=10)
    assert (report.sequences, report.tokens) == (2, 16 + 4)
    first = inspect(model, "abcdefghijklmnop", tokenizer=Letters(), max_length=10, max_sequences=1)
    close(first, inspect(model, "abcdefgh", tokenizer=Letters()))


def test_labels_are_the_tokens_and_padding_has_none():
    report = batches(["ab", "abcd"], Letters(), 8, 512, torch.device("cpu"))
    assert [batch.labels for batch in report] == [
        [["<s>", "a", "b", "</s>"], ["<s>", "a", "b", "c", "d", "</s>"]]
    ]
    numbers = torch.arange(6)
    assert [numbers[kept].tolist() for kept in report[0].real_positions(6)] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5],
    ]


def test_images_and_two_towers():
    report = inspect(tiny("clip"), reading("clip"))
    assert len(report.heads) == 4 * 4 and {record["stack"] for record in report.depths} == {
        "text_model.encoder.layers",
        "vision_model.encoder.layers",
    }
    assert len(inspect(tiny("vit"), reading("vit")).heads) == 8


def test_a_compiled_model_is_looked_at_without_its_graph():
    model = tiny("llama")
    close(inspect(torch.compile(model, backend="eager"), reading("llama")), inspect(model, reading("llama")))


def test_half_precision():
    report = inspect(tiny("llama").to(torch.bfloat16), reading("llama"))
    for half, full in zip(report.heads, inspect(tiny("llama"), reading("llama")).heads, strict=True):
        assert half["entropy"] == pytest.approx(full["entropy"], abs=0.1)


def test_progress_is_reported():
    calls = []
    inspect(tiny("llama"), reading("llama"), batch_size=2, progress=lambda *numbers: calls.append(numbers))
    assert calls == [(2, 3), (3, 3)]


def test_maps_exist_in_blocks_of_rows_only(monkeypatch):
    """With room for 2 * 16 rows of 4 heads and 200 keys, nothing larger is ever made."""
    largest = []
    right = sequence.softmax_rows

    def watched(*arguments):
        result = right(*arguments)
        largest.append(result.numel())
        return result

    monkeypatch.setattr(sequence, "softmax_rows", watched)
    whole = inspect(tiny("llama"), torch.randint(3, 60, (2, 200), generator=torch.Generator().manual_seed(1)))
    most = max(largest)
    assert most == 4 * 199 * 200
    monkeypatch.setattr(sequence, "_BLOCK", 32 * 4 * 200)
    largest.clear()
    close(
        inspect(tiny("llama"), torch.randint(3, 60, (2, 200), generator=torch.Generator().manual_seed(1))),
        whole,
    )
    assert max(largest) <= 32 * 4 * 200 < most


def test_attention_with_sinks_of_its_own_is_refused():
    model = GptOssForCausalLM(
        GptOssConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1, attn_implementation="eager")
    ).eval()
    torch.nn.init.constant_(model.model.layers[0].self_attn.sinks, 2.0)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn in GptOssForCausalLM .* adds s_aux"):
        inspect(model, torch.tensor([[3, 4, 5, 6]]))


def test_position_bias_is_refused():
    config = T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=24, num_layers=2, num_heads=4)
    with pytest.raises(ValueError, match="encoder and a decoder.*get_encoder"):
        inspect(T5ForConditionalGeneration(config), torch.tensor([[3, 4]]))
    torch.manual_seed(0)
    encoder = T5EncoderModel(config).eval()
    encoder.config.is_encoder_decoder = False
    torch.nn.init.normal_(
        encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight, std=3.0
    )
    with pytest.raises(ValueError, match="adds position_bias"):
        inspect(encoder, torch.tensor([[3, 4, 5, 6]]))


@pytest.mark.parametrize(
    ("given", "options", "error", "words"),
    [
        ([], {}, TypeError, "a list of nothing"),
        ([1, 2], {}, TypeError, "a list of int"),
        (3, {}, TypeError, "not int"),
        ("text", {}, ValueError, "'tokenizer'"),
        ({}, {}, ValueError, "no sequences"),
        ({"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(3, 3)}, {}, ValueError, "agree"),
        (torch.ones(0, 3).long(), {}, ValueError, "at least 1"),
        (torch.tensor([[5]]), {}, ValueError, "two tokens or more"),
        (torch.tensor([[5, 6]]), {"batch_size": 0}, ValueError, "'batch_size'"),
        (torch.tensor([[5, 6]]), {"max_length": 2.5}, TypeError, "'max_length'"),
        (torch.tensor([[5, 6]]), {"max_sequences": 0}, ValueError, "'max_sequences'"),
    ],
)
def test_nonsense_is_answered_with_what_would_work(given, options, error, words):
    with pytest.raises(error, match=words):
        inspect(tiny("llama"), given, **options)


def test_only_transformers_models_are_taken():
    with pytest.raises(TypeError, match="not Linear"):
        inspect(torch.nn.Linear(2, 2), torch.tensor([[1, 2]]))


def test_a_model_without_the_interface_is_refused(monkeypatch):
    model = tiny("llama")
    for layer in model.model.layers:
        monkeypatch.setattr(
            layer.self_attn,
            "forward",
            types.MethodType(lambda self, hidden_states, **_: (hidden_states, None), layer.self_attn),
        )
    with pytest.raises(
        ValueError, match="LlamaForCausalLM made no call through transformers' attention interface"
    ):
        inspect(model, torch.tensor([[3, 4]]))


def test_the_beginning_is_cut_unless_there_is_padding():
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6)
    [whole] = batches({"input_ids": ids, "attention_mask": mask}, None, 2, 6, torch.device("cpu"))
    assert whole.beginning(4).inputs["input_ids"].tolist() == [[0, 1, 2, 3]]
    mask[0, 0] = 0
    [padded] = batches({"input_ids": ids, "attention_mask": mask}, None, 2, 6, torch.device("cpu"))
    assert padded.beginning(4).inputs["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]
