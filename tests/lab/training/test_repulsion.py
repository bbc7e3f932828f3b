"""Repulsion between the heads of a model: right blocks of the right matrices, and nothing else."""

import pytest
import torch
import transformers
from torch.utils.data import Dataset

import unsoft
from unsoft.lab.training import Repulsion, repulse
from unsoft.lab.training.repulsion import descent, head_matrices

WORDS = torch.randint(3, 50, (4, 9), generator=torch.Generator().manual_seed(0))


def llama(heads=4, key_heads=2, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def with_gradients(model):
    model(WORDS, labels=WORDS).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["svgd", "repel"])
def test_heads_are_contiguous_blocks_and_key_heads_are_fewer(kind):
    model = llama()
    before = with_gradients(model)
    repulse(model, alpha=0.3, kind=kind)
    changed = set()
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter.grad, before[name]):
            changed.add(name)
    projections = {f"model.layers.{layer}.self_attn.{x}_proj.weight" for layer in (0, 1) for x in "qkv"}
    assert changed == projections
    for name in projections:
        heads = 4 if "q_proj" in name else 2
        weight, gradient = model.get_parameter(name).detach(), before[name]
        # Head h of 8 rows, cut out one by one.
        blocks = torch.stack([weight[8 * head : 8 * head + 8].flatten() for head in range(heads)])
        slopes = torch.stack([gradient[8 * head : 8 * head + 8].flatten() for head in range(heads)])
        expected = descent(blocks, slopes, kind, alpha=0.3)
        for head in range(heads):
            changed = model.get_parameter(name).grad[8 * head : 8 * head + 8].flatten()
            assert torch.allclose(changed, expected[head], atol=1e-7)


def test_distances_are_float32_in_a_model_of_bfloat16():
    small, full = llama(dtype=torch.bfloat16), llama()
    full.load_state_dict(small.float().state_dict())
    small = small.to(torch.bfloat16)
    for model in (small, full):
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = (
                (0.01 * torch.randn(parameter.shape, generator=generator)).bfloat16().to(parameter.dtype)
            )
        repulse(model, alpha=0.1)
    for (_, one, _), (_, other, _) in zip(head_matrices(small), head_matrices(full), strict=True):
        assert one.grad.dtype == torch.bfloat16
        assert torch.allclose(one.grad.float(), other.grad, rtol=0.01, atol=1e-6)


def test_what_cannot_repel_is_said():
    with pytest.raises(ValueError, match="LlamaForCausalLM have one head each, and no other to repel"):
        repulse(llama(heads=1, key_heads=1))
    with pytest.raises(ValueError, match="'alpha' must be a number of at least 0, not -1"):
        Repulsion(alpha=-1)
    with pytest.raises(ValueError, match="'kind' must be 'svgd', 'spos' or 'repel', not 'push'"):
        Repulsion(kind="push")


@pytest.mark.parametrize("kind", ["svgd", "spos", "repel"])
def test_equal_heads_separate(kind):
    """Queries and keys of all heads alike: repulsion pulls them apart,
    plain training of the same length hardly does."""
    apart = {}
    for repelled in (False, True):
        model = llama(key_heads=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with torch.no_grad():
            for _, weight, heads in head_matrices(model):
                weight.copy_(weight[: len(weight) // heads].repeat(heads, 1))
        for _ in range(20):
            optimizer.zero_grad()
            model(WORDS, labels=WORDS).loss.backward()
            if repelled:
                repulse(model, alpha=0.5, kind=kind, step_size=0.05)
            optimizer.step()
        weight = model.model.layers[0].self_attn.q_proj.weight.detach().reshape(4, -1)
        apart[repelled] = torch.pdist(weight).min().item()
    assert apart[True] > 0.5 and apart[True] > 5 * apart[False]


class Texts(Dataset):
    def __len__(self):
        return len(WORDS)

    def __getitem__(self, place):
        return {"input_ids": WORDS[place], "labels": WORDS[place]}


@pytest.mark.parametrize("pieces", [1, 2])
def test_the_callback_does_what_a_plain_loop_does(tmp_path, pieces):
    """Trainer with the callback against backward, clip, repulse, clip, step by hand; gradients that are
    gathered from pieces of a batch are changed once, when all are there."""
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        learning_rate=0.01,
        per_device_train_batch_size=4 // pieces,
        gradient_accumulation_steps=pieces,
        use_cpu=True,
        weight_decay=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        optim="sgd",
        train_sampling_strategy="sequential",
        logging_strategy="no",
    )
    trained = llama()
    transformers.Trainer(
        trained, settings, train_dataset=Texts(), callbacks=[Repulsion(alpha=0.2, kind="repel")]
    ).train()
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(WORDS, labels=WORDS).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        repulse(model, alpha=0.2, kind="repel")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for one, other in zip(trained.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_noise_of_the_callback_comes_from_the_seed_and_the_step_alone(tmp_path):
    """Processes that train copies of a model may have drawn unequally many numbers before."""
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_grad_norm=0.0)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    steps = []
    for step, drawn in ((0, 1), (0, 2), (1, 1)):
        model, callback = llama(), Repulsion(kind="spos", temperature=1.0)
        with_gradients(model)
        callback.on_train_begin(args, state, control, model=model)
        torch.rand(drawn)
        state.global_step = step
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        callback.on_pre_optimizer_step(args, state, control, model=model, optimizer=optimizer)
        steps.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert torch.equal(steps[0], steps[1])
    assert not torch.allclose(steps[0], steps[2])


def test_heads_of_queries_with_a_gate_beside_them_are_counted_as_the_model_does():
    config = transformers.Qwen3NextConfig(
        vocab_size=9,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["full_attention"],
        num_experts=0,
    )
    matrices = head_matrices(transformers.Qwen3NextForCausalLM(config))
    assert [(len(weight), heads) for _, weight, heads in matrices] == [(64, 4), (16, 2), (16, 2)]


@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_other_architectures_have_heads_too(kind):
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "vit":
        model = transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **size))
    else:
        model = transformers.BertModel(transformers.BertConfig(vocab_size=9, **size))
    assert [heads for _, _, heads in head_matrices(model)] == [2, 2, 2]


def test_swapped_models_keep_their_heads():
    model = unsoft.hf.swap(llama(), "cog")
    with_gradients(model)
    repulse(model)
    assert all(weight.grad.isfinite().all() for _, weight, _ in head_matrices(model))


def test_heads_without_a_gradient_are_not_passed_over_in_silence():
    with pytest.raises(ValueError, match="has a gradient; call it after loss.backward"):
        repulse(llama())
    frozen = llama().requires_grad_(False)
    with pytest.raises(ValueError, match="no head can be pushed"):
        Repulsion().on_train_begin(None, None, None, model=frozen)
    model = llama()
    model.model.layers[0].self_attn.q_proj.requires_grad_(False)  # the others are pushed all the same
    model(WORDS, labels=WORDS).loss.backward()
    before = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    repulse(model)
    assert model.model.layers[0].self_attn.q_proj.weight.grad is None
    assert not torch.equal(model.model.layers[0].self_attn.k_proj.weight.grad, before)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="'kind' must be 'svgd', 'spos' or 'repel'"):
        repulse(llama(), kind="push")
    with pytest.raises(ValueError, match="'alpha' must be a number of at least 0"):
        repulse(llama(), alpha=-1.0)
    with pytest.raises(ValueError, match="'kind' must be"):
        Repulsion(kind="")
    with pytest.raises(TypeError, match="'alpha' must be a number, not '0.1'"):
        repulse(llama(), alpha="0.1")
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="GPT2Attention has no separate linear maps"):
        repulse(gpt)
