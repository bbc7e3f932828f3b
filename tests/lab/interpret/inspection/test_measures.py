"""The numbers are those of ``unsoft.measure`` on the model's own attention maps,
taken one sequence at a time, without padding."""

import pytest
import torch

import unsoft
from tests.lab.interpret.inspection.tiny import TEXT, reading, tiny
from unsoft import magnitude, measure
from unsoft.lab.interpret.inspection import inspect
from unsoft.measure import Summary

OUT_PROJ = {
    "llama": lambda m, k: m.model.layers[k].self_attn.o_proj.weight.T,
    "mistral": lambda m, k: m.model.layers[k].self_attn.o_proj.weight.T,
    "qwen3": lambda m, k: m.model.layers[k].self_attn.o_proj.weight.T,
    "gemma2": lambda m, k: m.model.layers[k].self_attn.o_proj.weight.T,
    "gpt2": lambda m, k: m.transformer.h[k].attn.c_proj.weight,
    "neox": lambda m, k: m.gpt_neox.layers[k].attention.dense.weight.T,
    "opt": lambda m, k: m.model.decoder.layers[k].self_attn.out_proj.weight.T,
    "bert": lambda m, k: m.encoder.layer[k].attention.output.dense.weight.T,
}


class Oracle:
    """A model's own maps, keys, values and hidden states for each sequence alone."""

    def __init__(self, name, inputs):
        self.model = tiny(name)
        self.model.set_attn_implementation("eager")
        self.sequences = []
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
            alone = ids[mask.bool()][None]
            with torch.no_grad():
                out = self.model(alone, output_attentions=True, output_hidden_states=True, use_cache=True)
            cache = out.get("past_key_values")
            self.sequences.append(
                (alone[0], [w[0] for w in out.attentions], [h[0] for h in out.hidden_states], cache)
            )


def rows_of(weights):
    """Which rows see two keys or more; in these models exactly the visible weights are above 0."""
    return (weights[0] > 0).sum(-1) > 1


@pytest.fixture(
    scope="module",
    params=[(name, side) for name in TEXT for side in ("", "left", "right")],
    ids=lambda case: "-".join(case),
)
def case(request):
    name, side = request.param
    inputs = reading(name, side)
    return name, inspect(tiny(name), inputs, batch_size=2), Oracle(name, inputs)


def heads_of(report, layer):
    return [record for record in report.heads if record["layer"] == layer]


def close(report, wanted, tolerance=2e-4):
    assert torch.allclose(
        torch.tensor(report, dtype=torch.float64), wanted.double(), atol=tolerance, rtol=tolerance
    ), (report, wanted)


def test_there_is_a_record_for_every_head(case):
    name, report, oracle = case
    assert [(r["layer"], r["head"]) for r in report.heads] == [
        (layer, head) for layer in (0, 1) for head in range(4)
    ]
    assert report.sequences == 3
    assert report.tokens == sum(len(ids) for ids, *_ in oracle.sequences)
    assert not report.skipped and all(layer["through_out_proj"] for layer in report.layers)


def test_focus_and_sign(case):
    _, report, oracle = case
    for layer in (0, 1):
        per_row = []
        for _, maps, _, _ in oracle.sequences:
            weights = maps[layer]
            looked = torch.stack(measure.summary(weights, (weights > 0)), -1)
            per_row.append(looked[:, rows_of(weights)])
        wanted = torch.cat(per_row, 1).mean(1)
        for at, field in enumerate(Summary._fields):
            close([record[field] for record in heads_of(report, layer)], wanted[:, at])


def test_sinks(case):
    _, report, oracle = case
    for layer in (0, 1):
        best, words, rows = torch.zeros(4), [], 0
        for ids, maps, _, _ in oracle.sequences:
            chosen = maps[layer][:, rows_of(maps[layer])]
            received = chosen.sum(1)
            best += received.amax(-1)
            rows += chosen.shape[1]
            words.append([str(int(ids[at])) for at in received.argmax(-1)])
        close([record["sink_share"] for record in heads_of(report, layer)], best / rows)
        for head, record in enumerate(heads_of(report, layer)):
            assert record["sink_token"] in {row[head] for row in words} | {"(first)"}
            assert record["sink_share"] >= record["sink_mass"] - 1e-6


def test_patterns_of_heads_are_compared(case):
    _, report, oracle = case
    for layer in (0, 1):
        rows = [maps[layer][:, rows_of(maps[layer])] for _, maps, _, _ in oracle.sequences]
        longest = max(x.shape[-1] for x in rows)
        padded = torch.cat([torch.nn.functional.pad(x, (0, longest - x.shape[-1])) for x in rows], 1)
        wanted = measure.head_similarity(padded)
        close(report.layers[layer]["pattern_similarity"], wanted)
        others = wanted.clone().fill_diagonal_(-2)
        close([record["pattern_similarity"] for record in heads_of(report, layer)], others.amax(-1))
        for head, record in enumerate(heads_of(report, layer)):
            assert others[head, record["pattern_twin"]] == pytest.approx(float(others[head].max()), abs=1e-4)


def values_of(name, oracle, layer, sequence):
    """(4 heads, n, dim) from the cache, or computed anew from the hidden states."""
    _, _, states, cache = sequence
    if cache is not None and name != "mistral":  # whose cache keeps those of its window only
        values = cache.layers[layer].values[0]
        return values.repeat_interleave(4 // len(values), 0)
    if name == "mistral":
        block = oracle.model.model.layers[layer]
        value = block.self_attn.v_proj(block.input_layernorm(states[layer]))
        return value.view(len(value), 2, -1).transpose(0, 1).repeat_interleave(2, 0)
    value = oracle.model.encoder.layer[layer].attention.self.value(states[layer])
    return value.view(len(value), 4, -1).transpose(0, 1)


def test_deletion_goes_through_the_output_projection(case):
    name, report, oracle = case
    for layer in (0, 1):
        out_proj = OUT_PROJ[name](oracle.model, layer).detach().reshape(4, -1, 32)
        removed, total, count, rows = torch.zeros(4), torch.zeros(4), torch.zeros(4), 0
        for sequence in oracle.sequences:
            weights = sequence[1][layer]
            chosen = rows_of(weights)
            value, residual = values_of(name, oracle, layer, sequence), sequence[2][layer]
            for head in range(4):
                written = value[head] @ out_proj[head]
                gain = (written * residual).sum(-1) / residual.square().sum(-1)
                moved = weights[head, chosen] * gain
                removed[head] += -moved[moved < 0].sum()
                total[head] += moved.abs().sum()
                count[head] += (moved < 0).sum()
            rows += int(chosen.sum())
        records = heads_of(report, layer)
        close([r["deletion_share"] for r in records], removed / total, 1e-3)
        close([r["deletion_strength"] for r in records], removed / count, 1e-3)
        close([r["deletion_amount"] for r in records], removed / rows, 1e-3)
        twins = measure.parameter_similarity(out_proj).fill_diagonal_(-2).amax(-1)
        close([r["parameter_similarity"] for r in records], twins)


def test_residual_stream_by_depth(case):
    name, report, oracle = case
    assert [record["depth"] for record in report.depths] == [0, 1, 2]
    # Elsewhere than in BERT a final norm stands between the last block and the last of the hidden states.
    for record in report.depths[: 3 if name == "bert" else 2]:
        looked = [
            measure.collapse(states[record["depth"]], states[0], tokens=ids)
            for ids, _, states, _ in oracle.sequences
        ]
        for field in measure.collapse(torch.eye(2), torch.eye(2))._fields:
            wanted = sum(float(getattr(x, field)) for x in looked) / len(looked)
            assert record[field] == pytest.approx(wanted, rel=2e-3, abs=2e-3), (field, record["depth"])


@pytest.mark.parametrize("side", ["", "left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_hijack_and_magnitude_of_causal_rows(name, side):
    """Models without rotary positions, whose cached keys are the content."""
    inputs = reading(name, side)
    report, oracle = inspect(tiny(name), inputs), Oracle(name, inputs)
    for layer in (0, 1):
        shares, sizes, groups, lengths = [], [], [], []
        for ids, maps, _, cache in oracle.sequences:
            keys = cache.layers[layer].keys[0]
            weights = maps[layer]
            mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            worth = magnitude.prefix_weighting(keys, eps=1e-2)
            looked = measure.hijack(weights, keys, mask, magnitude_weights=worth.weights)
            shares.append(torch.stack(looked, -1)[:, 1:])
            sizes.append(worth.magnitude[:, -1])
            groups.append(torch.tensor([len(set(row.tolist())) for row in measure.key_groups(keys)]))
            lengths.append(len(ids))
        wanted, records = torch.cat(shares, 1).mean(1), heads_of(report, layer)
        for at, field in enumerate(("hijack_attention", "hijack_magnitude", "hijack_excess")):
            close([record[field] for record in records], wanted[:, at], 2e-3)
        close([record["magnitude"] for record in records], torch.stack(sizes).mean(0), 1e-3)
        close(
            [r["groups_per_key"] for r in records], torch.stack(groups).double().mean(0) / (sum(lengths) / 3)
        )
    assert any(record["hijack_attention"] > 0 for record in report.heads), "there is a crowd to be found"


def test_hijack_of_full_rows():
    inputs = reading("bert", "right")
    report, oracle = inspect(tiny("bert"), inputs), Oracle("bert", inputs)
    for layer in (0, 1):
        shares = []
        for ids, maps, states, _ in oracle.sequences:
            keys = oracle.model.encoder.layer[layer].attention.self.key(states[layer]).detach()
            keys = keys.view(len(ids), 4, -1).transpose(0, 1)
            shares.append(torch.stack(measure.hijack(maps[layer], keys), -1))
        wanted = torch.cat(shares, 1).mean(1)
        close([record["hijack_excess"] for record in heads_of(report, layer)], wanted[:, 2], 2e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3", "neox", "gemma2"])
def test_keys_are_compared_without_their_rotary_positions(name):
    """The same token four times: in the first layer these are clones, wherever they stand."""
    model = tiny(name, sharpness=30.0)
    if name == "qwen3":
        model.model.layers[0].self_attn.k_norm.weight.data.mul_(20.0)
    ids = torch.tensor([[5, 9, 9, 9, 9, 7]])
    report = inspect(model, ids)
    for record in heads_of(report, 0):
        assert record["groups_per_key"] <= 3 / 6 + 1e-9
    with torch.no_grad():
        rotated = model(ids, use_cache=True).past_key_values.layers[0].keys[0]
    assert any(len(set(groups.tolist())) > 3 for groups in measure.key_groups(rotated)), (
        "rotated they would differ"
    )


def test_rows_of_a_sliding_window_are_solved_one_by_one():
    model, ids = tiny("mistral"), reading("mistral")["input_ids"][:1]
    report = inspect(model, ids)
    assert [layer["hijack_rows"] for layer in report.layers] == [4, 4], "a sample of rows"
    assert [layer["rows"] for layer in report.layers] == [13, 13], (
        "the other measures have all rows that see two keys"
    )
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0][0]
        projected = model.model.layers[0].self_attn.k_proj(
            model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        )
    keys = projected.view(14, 2, 8).transpose(0, 1)
    rows = torch.arange(1, 14)[torch.linspace(0, 12, 4).long()]
    shares = []
    for row in rows:
        seen = torch.arange(14).le(row) & torch.arange(14).gt(row - 6)
        worth = magnitude.weighting(keys[:, seen], eps=1e-2).weights.repeat_interleave(2, 0)
        mine = keys[:, seen].repeat_interleave(2, 0)
        shares.append(
            measure.hijack(weights[:, row, seen][:, None], mine, magnitude_weights=worth).magnitude_share[
                :, 0
            ]
        )
    close([record["hijack_magnitude"] for record in heads_of(report, 0)], torch.stack(shares).mean(0), 2e-3)


@pytest.mark.parametrize(
    ("mechanism", "side"),
    [
        *[("softmax", side) for side in ("", "left", "right")],
        *[("cog", ""), ("relu2", "left"), ("magnitude+softmax", "right"), ("gpam", "left")],
        *[("linear-elu1", ""), ("linear-elu1", "right"), ("magnitude+softmax", "left")],
    ],
)
def test_swapped_mechanisms_are_seen_as_they_are(mechanism, side):
    model = unsoft.hf.swap(tiny("llama"), mechanism)
    inputs = reading("llama", side)
    report = inspect(model, inputs)
    assert {layer["mechanism"] for layer in report.layers} == {mechanism}
    sums, rows = torch.zeros(4), 0
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        with torch.no_grad():
            weights = model(ids[mask.bool()][None], output_attentions=True).attentions[0][0]
        sums += measure.negative_share(weights)[:, 1:].sum(-1)
        rows += weights.shape[-2] - 1
    close([record["negative_share"] for record in heads_of(report, 0)], sums / rows, 1e-3)
    if mechanism == "softmax":
        stock = inspect(tiny("llama"), inputs)
        for one, two in zip(stock.heads, report.heads, strict=True):
            assert one["entropy"] == pytest.approx(two["entropy"], abs=1e-4)
