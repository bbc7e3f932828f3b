"""Learnable mechanisms are parameters of the model and train like any other."""

import pytest
import torch
import transformers
from torch.utils.data import Dataset

import unsoft
from unsoft.modules.registry import names

LEARNABLE = ["gated+cog", "gpam", "differential", "differential2", "sink+softmax", "magnitude+softmax"]
COMPILED = ["retention", "magnitude+softmax", "gpam", "linear-elu1", "differential2"]


class Texts(Dataset):
    """The same few random texts, to be learnt by heart."""

    def __init__(self) -> None:
        self.ids = torch.randint(3, 50, (8, 9), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def own(model) -> dict[str, torch.Tensor]:
    """Parameters of the mechanisms."""
    return {name: x for name, x in model.named_parameters() if ".unsoft." in name}


def gradients(model, words, run=None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (model if run is None else run)(words, labels=words, use_cache=False).loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() <= 1e-4 * (1 + gradient.abs().max()), name


@pytest.mark.parametrize("name", [*names(), *LEARNABLE])
def test_every_parameter_gets_a_finite_gradient(tiny, words, name):
    model = unsoft.hf.swap(tiny("llama"), name, init="paper").train()
    actual = gradients(model, words)
    unused = ("q_proj", "k_proj") if name == "decay" else ()  # whose weights do not depend on content
    wanted = {parameter for parameter, x in model.named_parameters() if x.requires_grad}
    assert actual.keys() == {
        parameter for parameter in wanted if not any(part in parameter for part in unused)
    }
    assert all(bool(x.isfinite().all()) for x in actual.values())
    if name in LEARNABLE:
        assert own(model) and any(bool(actual[parameter].any()) for parameter in own(model))


@pytest.mark.parametrize("name", ["cog", *LEARNABLE])
def test_gradient_checkpointing_changes_no_gradient(tiny, words, name):
    model = unsoft.hf.swap(tiny("llama"), name).train()
    expected = gradients(model, words)
    model.gradient_checkpointing_enable()
    assert_close(gradients(model, words), expected)


# Gates are solved for outside the graph; where a graph breaks,
# torch itself looks at .grad of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cog", *COMPILED])
def test_compiled_models_give_the_same_gradients(tiny, words, name):
    model = unsoft.hf.swap(tiny("llama"), name).train()
    expected = gradients(model, words)
    torch._dynamo.reset()
    assert_close(gradients(model, words, torch.compile(model, backend="aot_eager")), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_gates_refuse_packed_texts_too(tiny, words):
    model = unsoft.hf.swap(tiny("llama"), "magnitude+softmax")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    with pytest.raises(ValueError, match="depend on all keys before"):
        compiled(words[:1], position_ids=positions, use_cache=False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x in ("gpam", "magnitude+softmax") else pytest.mark.slow)
        for x in LEARNABLE
    ],
)
def test_mechanisms_train_under_trainer_and_checkpoints_resume(tiny, tmp_path, name):
    model = unsoft.hf.swap(tiny("llama"), name, init="paper")
    before = {parameter: x.detach().clone() for parameter, x in own(model).items()}
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        learning_rate=0.01,
        per_device_train_batch_size=4,
        use_cpu=True,
        seed=0,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=1,
    )
    trainer = transformers.Trainer(model, settings, train_dataset=Texts())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert all(
        not torch.equal(x, before[parameter]) for parameter, x in own(model).items() if x.requires_grad
    )
    saved = unsoft.hf.load(tmp_path / "checkpoint-6")
    assert all(torch.equal(x, saved.state_dict()[parameter]) for parameter, x in model.state_dict().items())

    again = transformers.Trainer(
        unsoft.hf.swap(tiny("llama"), name, init="paper"), settings, train_dataset=Texts()
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert all(
        torch.allclose(x, saved.state_dict()[parameter], atol=1e-5)
        for parameter, x in again.model.state_dict().items()
    )
