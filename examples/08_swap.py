"""Put a mechanism into a transformers model: weights, positions, masks, caches and generate stay.

python examples/08_swap.py          (needs unsoft[hf]; a real model: unsoft.hf.load_model("smollm2"))
"""

import tempfile

import torch
import transformers

import unsoft

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
)
model = transformers.LlamaForCausalLM(config).eval()
prompt = torch.arange(3, 9)[None]
before = model(prompt).logits

# An open start changes nothing until it is trained; cog does, so softmax stays in the first and last layer.
unsoft.hf.swap(model, "magnitude+softmax", init="open")
print(f"magnitude, open start: logits move by {(model(prompt).logits - before).abs().max():.0e}")
unsoft.hf.swap(model, "cog", keep_first_last=True)
print(f"cog: logits move by {(model(prompt).logits - before).abs().max():.0e}")
options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
text = model.generate(prompt, **options)

# What was saved comes back bit for bit, mechanism included.
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = unsoft.hf.load(folder)
print("generated:", text[0, 6:].tolist(), "after loading:", again.generate(prompt, **options)[0, 6:].tolist())
assert torch.equal(model(prompt).logits, again(prompt).logits)
