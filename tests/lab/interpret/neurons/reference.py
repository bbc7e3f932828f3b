"""Ablation by brute force: the model runs with a neuron set to its mean,
and predictions are compared in double precision."""

from __future__ import annotations

import numpy as np
import torch

from unsoft.lab.interpret.neurons.parts import find_parts

FIRST = 3


def activations_of(model, down, ids):
    seen = []
    hook = down.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach()))
    with torch.no_grad():
        model(ids)
    hook.remove()
    return seen[0].reshape(*ids.shape, -1)


def logits_of(model, ids, down, neuron, value, scale=None):
    """Logits (sequences, length, words) with a neuron at ``value``;
    ``scale`` holds that of the final norm."""
    norm = find_parts(model).norm
    hooks, scales = [], []

    def silence(module, given):
        x = given[0].clone()
        x[..., neuron] = value
        return (x, *given[1:])

    def watch(module, given, result):
        r = given[0].double()
        centred = r - r.mean(-1, keepdim=True) if getattr(module, "bias", None) is not None else r
        eps = getattr(module, "eps", None) or module.variance_epsilon
        own = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        scales.append(own)
        if scale is not None:
            gain = module.weight.double()
            if "Gemma" in type(module).__name__:
                gain = gain + 1
            shift = 0.0 if getattr(module, "bias", None) is None else module.bias.double()
            return (centred / scale * gain + shift).to(result)
        return None

    if neuron is not None:
        hooks.append(down.register_forward_pre_hook(silence))
    hooks.append(norm.register_forward_hook(watch))
    with torch.no_grad():
        logits = model(ids).logits.double()
    for hook in hooks:
        hook.remove()
    return logits, scales[0]


def figures(logits, ids, log_share):
    """Loss, entropy, divergence from word frequency and best word at the tokens that are looked at."""
    z = logits[:, FIRST:-1].flatten(0, 1).numpy()
    target = ids[:, FIRST + 1 :].flatten().numpy()
    top = z.max(1, keepdims=True)
    log_p = z - top - np.log(np.exp(z - top).sum(1, keepdims=True))
    p, share = np.exp(log_p), np.exp(log_share)
    return {
        "loss": -log_p[np.arange(len(z)), target],
        "entropy": -(p * log_p).sum(1),
        "kl": (share * (log_share - log_p)).sum(1),
        "best": z.argmax(1),
    }


def brute_force(model, ids, neuron, counts):
    """The effects of one neuron, by name as in :class:`Effects`."""
    down = find_parts(model).down
    mean = activations_of(model, down, ids)[:, FIRST:-1].flatten(0, 1)[:, neuron].mean()
    log_share = np.log((counts.double().numpy() + 1) / (counts.double().numpy() + 1).sum())
    v = log_share - log_share.mean()
    v = torch.from_numpy(v / np.linalg.norm(v))
    base, scale = logits_of(model, ids, down, None, None)
    total, _ = logits_of(model, ids, down, neuron, mean)
    frozen, _ = logits_of(model, ids, down, neuron, mean, scale)
    held = total + ((base - total) @ v)[..., None] * v
    before = figures(base, ids, log_share)
    result = {}
    for ending, logits in (("", total), ("_frozen", frozen), ("_held", held)):
        after = figures(logits, ids, log_share)
        result |= {name + ending: after[name] - before[name] for name in ("loss", "entropy", "kl")}
        result["changed" + ending] = (after["best"] != before["best"]).astype(float)
    return {name: torch.from_numpy(value) for name, value in result.items()}
