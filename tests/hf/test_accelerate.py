"""accelerate: the same logits, gradients and generated tokens as the eager model, for every family."""

import copy
import pickle

import pytest
import torch
import transformers

import unsoft
from unsoft.hf import fast_attention, fast_delta

_SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 50,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_GATED = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
}
_CHANNELS = {
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_WINDOW = {"sliding_window": 5}
_MIXED = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "gpt_oss": ("GptOssForCausalLM", _EXPERTS | _MIXED),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        _EXPERTS
        | {
            **_LATENT,
            "num_key_value_heads": 1,
            "o_groups": 2,
            "o_lora_rank": 8,
            "num_hidden_layers": 3,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "sliding_window": 5,
        },
    ),
    "gemma2": ("Gemma2ForCausalLM", _WINDOW | {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8}),
    "mistral": ("MistralForCausalLM", _WINDOW),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "num_heads": 4,
            "num_layers": 2,
            "d_ff": 48,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "relative_attention_num_buckets": 8,
        },
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", _GATED),
    "kimi_linear": ("KimiLinearForCausalLM", _EXPERTS | _LATENT | _CHANNELS),
}
MORE = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", _MIXED),
    "gpt2": ("GPT2LMHeadModel", dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", _EXPERTS | _WINDOW),
    "granite_swa": ("GraniteSWAForCausalLM", _WINDOW),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", _EXPERTS | _WINDOW),
    "hy_v4": ("HYV4ForCausalLM", _EXPERTS | _LATENT),
    "flint": ("FlintForCausalLM", _EXPERTS | _MIXED),
    "openai_privacy_filter": ("OpenAIPrivacyFilterForTokenClassification", _EXPERTS | _WINDOW),
    "qwen3_next": ("Qwen3NextForCausalLM", _EXPERTS | _GATED),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", _EXPERTS | _GATED),
    "qwen4_exp": (
        "Qwen4ExpForCausalLM",
        _EXPERTS
        | _GATED
        | {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "hc_lowrank": 8,
        },
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", _GATED),
    "bailing_hybrid": ("BailingHybridForCausalLM", _EXPERTS | _LATENT | _CHANNELS),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        _EXPERTS | _LATENT | _CHANNELS | {"head_dim": 0, "qk_rope_head_dim": 0, "index_kpool": 4},
    ),
}
EVERY = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
WORDS = torch.randint(3, 50, (1, 23), generator=torch.Generator().manual_seed(5))


def tiny(family, dtype=torch.float32, **options):
    name, sizes = (FAMILIES | MORE)[family]
    kind = getattr(transformers, name)
    sizes = _SIZE | sizes | options
    if family == "glm5_next":
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
        config = kind.config_class(text_config=sizes, vision_config=vision | {"out_hidden_size": 32})
    else:
        config = kind.config_class(**sizes)
    torch.manual_seed(3)
    model = kind(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # zero or not initialised
            parameter.data.normal_()
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default has no float64
    return model.to(dtype)


def eager(family, dtype=torch.float32, **options):
    model = tiny(family, dtype, **options)
    model.set_attn_implementation("eager")
    return model


def inputs(family, words=WORDS):
    return {"input_ids": words} | ({"decoder_input_ids": words[:, :9]} if family == "t5" else {})


@pytest.fixture
def runs(monkeypatch):
    """Calls of our kernels so far."""
    calls = []
    for module in (fast_attention, fast_delta):
        run = module._run
        monkeypatch.setattr(module, "_run", lambda *a, run=run, **o: calls.append(1) or run(*a, **o))
    return calls


@pytest.mark.parametrize("family", EVERY)
def test_logits_and_tokens_of_the_eager_model(family, runs):
    model, reference = tiny(family), eager(family)
    report = unsoft.hf.accelerate(model)
    assert not report.kept
    runs.clear()
    with torch.no_grad():
        expected = reference(**inputs(family)).logits
        assert (model(**inputs(family)).logits - expected).abs().max() <= 1e-4
    assert len(runs) >= len(report.replaced) - 1  # glm5_next has an image tower
    if model.can_generate():
        settings = {"max_new_tokens": 6, "do_sample": False}
        words = WORDS[:, :12]
        assert torch.equal(model.generate(words, **settings), reference.generate(words, **settings))


def gradients(model, family, **options):
    out = model(**inputs(family), **options).logits
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    (out * direction).sum().backward()
    return {name: x.grad.double() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("family", EVERY)
def test_gradients_of_the_eager_model_in_float64(family, runs):
    expected = gradients(eager(family, torch.float64), family)
    model = tiny(family)
    unsoft.hf.accelerate(model)
    model.train()
    model.gradient_checkpointing_enable()
    runs.clear()
    actual = gradients(model, family, use_cache=False)
    assert runs and actual.keys() == expected.keys()
    # Gradients of routers of experts are zero but for rounding, which is measured by the largest of all.
    rounding = 1e-6 * max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() <= 1e-3 * gradient.abs().max() + rounding, name


LENGTHS = (9, 14)
STARTS = {
    "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
    "cu_seq_lens_q": torch.tensor([0, 9, 23], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 9, 23], dtype=torch.int32),
    "seq_idx": torch.repeat_interleave(torch.tensor(LENGTHS))[None].int(),
}
"""Keywords of transformers' flattening collator for two texts."""


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("gpt_oss", ["position_ids"]),
        ("gemma2", ["position_ids"]),
        ("mistral", ["position_ids"]),
        ("qwen3_5", ["position_ids", "cu_seq_lens_q", "cu_seq_lens_k"]),
        ("qwen3_5", ["position_ids"]),
        ("qwen3_5", ["position_ids", "seq_idx"]),
        ("kimi_linear", ["position_ids", "cu_seq_lens_q", "cu_seq_lens_k"]),
    ],
)
@torch.no_grad()
def test_packed_texts_give_what_each_gives_alone(family, given):
    model, reference = tiny(family), eager(family)
    unsoft.hf.accelerate(model)
    alone = torch.cat([reference(words).logits for words in WORDS.split(LENGTHS, dim=1)], dim=1)
    for use_cache in (False, True):  # from positions, transformers' masks notice texts without a cache only
        packed = model(WORDS, **{name: STARTS[name] for name in given}, use_cache=use_cache).logits
        assert (packed - alone).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "t5", "qwen3_5"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding(family, side):
    words = torch.randint(3, 50, (2, 14), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(words)
    mask[0, :5] = 0
    mask = mask if side == "left" else mask.flip(1)
    model, reference = tiny(family), eager(family)
    unsoft.hf.accelerate(model)
    call = inputs(family, words) | {"attention_mask": mask}
    real = slice(None) if family == "t5" else mask.bool()  # of T5 the padded text is the encoder's
    assert (model(**call).logits[real] - reference(**call).logits[real]).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_realistic_sizes_against_the_definition(dtype):
    """A gpt-oss layer beyond one tile, with a window, padding and GQA, at width 64."""
    config = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 8, "num_hidden_layers": 1}
    model = tiny("gpt_oss", dtype, **config, sliding_window=70, layer_types=["sliding_attention"])
    attention = model.model.layers[0].self_attn
    unsoft.hf.accelerate(model)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 200, 64, dtype=dtype) for heads in (8, 2, 2))
    padding = torch.ones(2, 200, dtype=torch.bool)
    padding[1, :40] = False
    mask = fast_attention.lazy_mask(
        *(2, 200, 200),
        mask_function=transformers.masking_utils.sliding_window_causal_mask_function(70),
        attention_mask=padding,
        implementation="eager",
        dtype=dtype,
    )
    out, _ = fast_attention.attend(attention, q, k, v, mask, scaling=0.2, s_aux=attention.sinks)
    assert mask._table is None  # 200 * 200 entries were never needed
    q, k, v = q.double(), k.double().repeat_interleave(4, 1), v.double().repeat_interleave(4, 1)
    i, j = torch.arange(200)[:, None], torch.arange(200)
    seen = (j <= i) & (j > i - 70) & padding[:, None, None]
    logits = (q @ k.mT * 0.2).masked_fill(~seen, -torch.inf)
    sinks = attention.sinks.double()[:, None, None].expand(2, -1, 200, 1)
    expected = (torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
    assert (out - expected)[padding].abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5", "hy_v4"])
def test_undo_restores_the_model(family):
    model = tiny(family)
    before = {name: (type(x), set(vars(x))) for name, x in model.named_modules()}
    implementation, keys = model.config._attn_implementation, model.state_dict().keys()
    report = unsoft.hf.accelerate(model)
    assert model.state_dict().keys() == keys
    assert unsoft.hf.accelerate(model) is report
    report.undo()
    report.undo()
    assert {name: (type(x), set(vars(x))) for name, x in model.named_modules()} == before
    assert model.config._attn_implementation == implementation
    assert unsoft.hf.accelerate(model) is not report


@torch.no_grad()
def test_copies_and_saved_models(tmp_path):
    model = tiny("qwen3_5")
    expected = model(WORDS).logits
    unsoft.hf.accelerate(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.model.layers[0].linear_attn) is type(model.model.layers[0].linear_attn)
        assert torch.equal(other(WORDS).logits, model(WORDS).logits)
        unsoft.hf.accelerate(other).undo()
    assert model.config._attn_implementation == "unsoft_sdpa"  # a copy does not restore the original
    model.save_pretrained(tmp_path)
    assert "unsoft" not in (tmp_path / "config.json").read_text()
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (saved(WORDS).logits - expected).abs().max() <= 1e-6


def test_weights_come_from_the_model_itself():
    model, reference = tiny("gpt_oss"), eager("gpt_oss")
    unsoft.hf.accelerate(model)
    with torch.no_grad():
        actual = model(WORDS, output_attentions=True).attentions
        expected = reference(WORDS, output_attentions=True).attentions
    assert len(actual) == 2
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(actual, expected, strict=True))


def test_a_mask_that_a_model_changes_is_used_as_changed():
    model = tiny("gpt_oss")
    unsoft.hf.accelerate(model)
    attention = model.model.layers[1].self_attn
    q, k, v = (torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    call = {"scaling": 0.5, "s_aux": attention.sinks}
    masks = [fast_attention.lazy_mask(1, 6, 6, implementation="eager") for _ in range(2)]
    masks[0][..., 2] = torch.finfo(torch.float32).min
    v[:, :, 2] = 1e6
    hidden, seen = (fast_attention.attend(attention, q, k, v, mask, **call)[0] for mask in masks)
    assert hidden.abs().max() < 1e2 < seen.abs().max()


def test_strong_decays_per_channel_take_the_own_function():
    """exp(-5) per channel is the least that our chunks can take."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    call = {"g": -8 * torch.rand(1, 40, 2, 8), "beta": torch.rand(1, 40, 2)}
    own = transformers.models.kimi_linear.modeling_kimi_linear.chunk_kimi_delta_attention
    out, state = fast_delta.delta_rule(q, k, v, **call, own=own)
    assert torch.equal(out, own(q, k, v, **call)[0]) and state is None
    packed, states = fast_delta.delta_rule(
        q, k, v, **call, own=own, cu_seqlens=torch.tensor([0, 15, 40]), output_final_state=True
    )
    parts = [(x[:, :15], x[:, 15:]) for x in (q, k, v, call["g"], call["beta"])]
    alone = [own(*part, output_final_state=True) for part in zip(*parts, strict=True)]
    assert torch.equal(packed, torch.cat([out for out, _ in alone], dim=1))
    assert torch.equal(states, torch.cat([state for _, state in alone]))
    with pytest.raises(ValueError, match="boundaries of packed texts must go from 0 to 40, not from 0 to 30"):
        fast_delta.delta_rule(q, k, v, **call, own=own, cu_seqlens=torch.tensor([0, 30]))


def test_only_what_was_replaced_changes_with_another_implementation():
    model = tiny("mistral")
    report = unsoft.hf.accelerate(model)
    unsoft.hf.swap(model, "cog")
    with pytest.raises(ValueError, match=r"MistralAttention runs a mechanism of unsoft\.hf\.swap already"):
        unsoft.hf.accelerate(model)
    report.undo()
    assert model.config._attn_implementation == "unsoft"
    other = tiny("mistral")
    first = unsoft.hf.accelerate(other)
    other.set_attn_implementation("eager")
    assert unsoft.hf.accelerate(other) is not first and other.config._attn_implementation == "unsoft_eager"


def test_what_cannot_be_accelerated_is_left_alone():
    with pytest.raises(TypeError, match="must be a transformers model, not Linear"):
        unsoft.hf.accelerate(torch.nn.Linear(2, 2))
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=9, hidden_size=8, n_head=2))
    with pytest.raises(ValueError, match="none goes through transformers' attention interface"):
        unsoft.hf.accelerate(bloom)
    model = tiny("gpt_oss").to("meta")
    with pytest.raises(ValueError, match="GptOssAttention is on meta; accelerate is for CPUs"):
        unsoft.hf.accelerate(model)
    assert model.config._attn_implementation == "eager"
    partial = tiny("gpt_oss")
    del partial.model.layers[0].self_attn.num_key_value_groups
    report = unsoft.hf.accelerate(partial)
    (kept,) = report.kept
    assert kept.name == "model.layers.0.self_attn" and "does not run on a sample" in str(report)


def test_another_eager_function_is_noticed(monkeypatch):
    """A model whose attention is not softmax of scaled products keeps it."""
    module = transformers.models.mistral.modeling_mistral
    own = module.eager_attention_forward

    def doubled(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        out, weights = own(module, query, key, value, attention_mask, scaling, dropout)
        return 2 * out, weights

    def biased(module, query, key, value, attention_mask, scaling, dropout=0.0, my_bias=None, **kwargs):
        return own(module, query, key, value, attention_mask, scaling, dropout)

    for function, reason in (
        (doubled, "computes something else than softmax of scaled products"),
        (biased, r"do not take \(my_bias\)"),
    ):
        monkeypatch.setattr(module, "eager_attention_forward", function)
        with pytest.raises(ValueError, match=reason):
            unsoft.hf.accelerate(tiny("mistral"))


def test_recorded_shapes_decide_against_sdpa(monkeypatch, runs):
    model = tiny("llama")
    unsoft.hf.accelerate(model)
    for ratio, calls in ((0.9, 0), (1.1, 2)):
        runs.clear()
        table = {("causal", "float32", False): {(64, 128): ratio}}
        monkeypatch.setattr(fast_attention, "_RECORDED", table)
        with torch.no_grad():
            model(WORDS)
        assert len(runs) == calls
