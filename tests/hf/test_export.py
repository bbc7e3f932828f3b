"""torch.export writes plain operations with equal results, or refuses by name."""

import pytest
import torch

import unsoft


def exported(model, words):
    with torch.no_grad():
        return torch.export.export(model, (words,), {"use_cache": False}, strict=False)


@pytest.mark.parametrize(
    "mechanism",
    [
        "cog",
        "gated+gpam",
        "density",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("softmax", "linear-relu", "stick-breaking")),
    ],
)
def test_a_swapped_model_is_exported_as_plain_operations(tiny, words, mechanism):
    model = unsoft.hf.swap(tiny("llama"), mechanism, init="paper")
    model(words)  # density looks at the rotation of keys once
    program = exported(model, words)
    used = {str(node.target).partition(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert "unsoft" not in used, "an operator that only unsoft has"
    with torch.no_grad():
        again = program.module()(words, use_cache=False).logits
        assert torch.allclose(again, model(words, use_cache=False).logits, atol=1e-5)


def test_an_exported_program_of_another_mechanism_differs(tiny, words):
    program = exported(unsoft.hf.swap(tiny("llama"), "cog"), words)
    softmax = unsoft.hf.swap(tiny("llama"), "softmax")(words, use_cache=False).logits
    assert not torch.allclose(program.module()(words, use_cache=False).logits, softmax, atol=1e-2)


def test_what_cannot_be_exported_says_so(tiny, words):
    model = unsoft.hf.swap(tiny("llama"), "magnitude+softmax")
    with pytest.raises(ValueError, match="export: .* compares keys before rotary .* call it once"):
        exported(model, words)
    model(words)
    with pytest.raises(ValueError, match="export: magnitude solves systems"):
        exported(model, words)


def test_a_fused_engine_that_is_asked_for_says_so():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return unsoft.attention(x, x, x, "cog", engine="native")

    with pytest.raises(ValueError, match="must run where unsoft is not installed"):
        torch.export.export(Layer(), (torch.randn(1, 2, 5, 4),), strict=False)


class Logits(torch.nn.Module):
    """A model with one input and one output."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, words):
        return self.model(words, use_cache=False).logits


@pytest.mark.filterwarnings("ignore::FutureWarning")  # onnxscript's, about torch's trees
@pytest.mark.parametrize("mechanism", ["cog", "stick-breaking"])
def test_onnx_holds_standard_operators_with_equal_results(tiny, words, tmp_path, mechanism):
    onnx = pytest.importorskip("onnx", reason="needs pip install onnx onnxscript onnxruntime")
    pytest.importorskip("onnxscript", reason="needs pip install onnx onnxscript onnxruntime")
    runtime = pytest.importorskip("onnxruntime", reason="needs pip install onnx onnxscript onnxruntime")
    model, file = unsoft.hf.swap(tiny("llama"), mechanism), tmp_path / "model.onnx"
    with torch.no_grad():
        torch.onnx.export(Logits(model), (words,), file, dynamo=True, verbose=False)
        expected = model(words, use_cache=False).logits
    assert {node.domain for node in onnx.load(file).graph.node} == {""}
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (actual,) = session.run(None, {session.get_inputs()[0].name: words.numpy()})
    torch.testing.assert_close(torch.from_numpy(actual), expected, atol=1e-4, rtol=1e-4)
