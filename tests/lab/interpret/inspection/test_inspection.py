"""Records, roles, files and patterns."""

import base64
import csv
import json

import pytest
import torch

from tests.lab.interpret.inspection.test_inspect import Letters
from tests.lab.interpret.inspection.tiny import reading, tiny
from unsoft.lab.interpret.inspection import inspect
from unsoft.lab.interpret.inspection.page import Pattern, find_patterns
from unsoft.lab.interpret.inspection.result import COLUMNS, ROLES


@pytest.fixture(scope="module")
def report():
    return inspect(tiny("llama"), reading("llama"))


def test_every_measure_has_a_column_with_words(report):
    measures = set(report.heads[0]) - {"layer", "head", "pattern_twin", "sink_token"}
    assert measures == {column.name for column in COLUMNS}
    assert all(column.title and column.help for column in COLUMNS)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_roles_are_thresholds_ranked_by_strength(role):
    heads = [
        {"head": k, role.measure: role.least + shift, role.columns[0]: role.least + shift, "name": k}
        for k, shift in enumerate((-0.01, 0.0, 0.3, 0.1))
    ]
    assert [head["head"] for head in role.heads(heads)] == [2, 3, 1]


def test_a_head_that_always_looks_at_the_first_token_is_a_sink():
    model = tiny("gpt2")
    attention = model.transformer.h[0].attn
    with torch.no_grad():
        # Queries of head 2 are constant; keys of head 2 are the position embedding's first coordinate,
        # huge for token 0 only.
        attention.c_attn.weight[:, 16:24] = 0
        attention.c_attn.bias[16:24] = torch.tensor([9.0] + [0.0] * 7)
        attention.c_attn.weight[:, 48:56] = 0
        attention.c_attn.weight[0, 48] = 9.0
        model.transformer.wte.weight[:, 0] = 0
        model.transformer.wpe.weight[:, 0] = 0
        model.transformer.wpe.weight[0, 0] = 50.0
    sinks = inspect(model, reading("gpt2")).ranked("sink")
    assert (sinks[0]["layer"], sinks[0]["head"]) == (0, 2)
    assert sinks[0]["sink_share"] > 0.99 and sinks[0]["sink_mass"] > 0.99
    assert sinks[0]["sink_token"] == "(first)", "three sequences that begin with different tokens"
    alike = reading("gpt2")["input_ids"].clone()
    alike[:, 0] = 5
    assert inspect(model, alike).ranked("sink")[0]["sink_token"] == "5"


def test_a_head_that_writes_minus_its_source_deletes():
    """Values are the residual stream's own coordinates (no norm between),
    the output projection takes them away again."""
    model = tiny("gpt2")
    block = model.transformer.h[0]
    block.ln_1 = torch.nn.Identity()
    with torch.no_grad():
        block.attn.c_attn.weight[:, 64:72] = torch.eye(32)[:, :8]
        block.attn.c_attn.weight[:, 72:80] = torch.eye(32)[:, 8:16]
        block.attn.c_attn.bias.zero_()
        block.attn.c_proj.weight[0:8] = -torch.eye(32)[:8]
        block.attn.c_proj.weight[8:16] = torch.eye(32)[8:16]
    first, second = inspect(model, reading("gpt2")).heads[:2]
    assert first["deletion_share"] == pytest.approx(1.0) and first["deletion_amount"] > 0
    assert second["deletion_share"] == 0.0 and second["deletion_amount"] == 0.0


def test_an_unknown_role_is_named(report):
    with pytest.raises(ValueError, match="did you mean 'sink'"):
        report.ranked("sinks")


def test_files_hold_the_records(report, tmp_path):
    names = ["inspection.json", "heads.csv", "depths.csv", "inspection.html"]
    assert [path.name for path in report.write(tmp_path)] == names
    kept = json.loads((tmp_path / "inspection.json").read_text())
    assert kept["schema"] == 1 and kept["heads"] == report.heads and kept["depths"] == report.depths
    rows = list(csv.DictReader((tmp_path / "heads.csv").read_text().splitlines()))
    assert [float(row["entropy"]) for row in rows] == [head["entropy"] for head in report.heads]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize("token", ["=1+1", "+1", "@SUM(A1)", "-2", " =cmd"])
def test_a_spreadsheet_is_given_no_formulas(report, tmp_path, token):
    from dataclasses import replace

    tmp_path /= "new"  # folders are created
    replace(report, heads=[report.heads[0] | {"sink_token": token}]).write(tmp_path)
    (row,) = csv.DictReader((tmp_path / "heads.csv").read_text().splitlines())
    assert row["sink_token"] == "'" + token


def test_patterns_are_the_models_own():
    model = tiny("bert")
    (pattern,) = find_patterns(model, ["abcdefg"], Letters(), tokens=6)
    assert pattern.tokens == ["<s>", "a", "b", "c", "d", "</s>"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(torch.tensor([[1, 3, 4, 5, 6, 2]]), output_attentions=True).attentions
    for layer, weights in pattern.layers.items():
        assert torch.allclose(weights, wanted[layer][0], atol=1e-5)


def test_patterns_as_bytes_keep_two_digits():
    weights = torch.tensor([[[0.5, -0.25], [0.0, 0.125]], [[1e-3, 0.0], [0.0, 0.0]]])
    kept = Pattern("a b", ["a", "b"], {3: weights}).to_dict()["layers"][3]
    numbers = torch.frombuffer(bytearray(base64.b64decode(kept["weights"])), dtype=torch.int8).view(2, 2, 2)
    back = numbers * torch.tensor(kept["scales"])[:, None, None] / 127
    assert (back - weights).abs().amax((-2, -1)).tolist() <= [0.5 / 127, 1e-3 / 127]
