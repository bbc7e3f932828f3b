"""Undo rotary embedding, for mechanisms that compare keys with each other.

Rotary embedding turns pairs of coordinates of a key by angles that grow with its position, so equal keys at
different positions are far apart. Magnitude and density need the keys as they are before that. transformers
rotates in the attention module and passes cos and sin of the angles to it (``position_embeddings``); a hook
passes them on to the attention function, which applies the inverse here.

Which coordinates make a pair, which of them are rotated at all and how cos is laid out differ between models.
So the first call tries the module's own forward function, with angles of our own and with none, and looks for
the inverse that maps the keys of the one to those of the other. That also finds layers that receive angles
and do not rotate, and rejects those that change their keys after the rotation.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unsoft.engines.call import compute_dtype
from unsoft.hf.architecture import forward_code, passes_keywords

Angles = Tensor | tuple[Tensor, Tensor]
"""cos and sin, (batch, length, width) or (length, width); or cos + i sin as one complex tensor."""
_ARGUMENT = "position_embeddings"
_CACHES = ("past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True)
class Inverse:
    """The inverse of a rotation of pairs of coordinates by angles with the given cos and sin."""

    layout: str
    """Order of pairs in cos and sin: "halves" (all of them twice), "pairs" (each twice), "whole"."""
    neighbours: bool
    """Pairs are coordinates 2i and 2i + 1; otherwise i and i + width / 2."""
    last: bool
    """The rotated coordinates are the last ones of a key; otherwise the first ones."""
    sign: int
    """-1 if the model turns the other way."""

    def apply(self, key: Tensor, angles: Angles) -> Tensor:
        """Return keys (batch, heads, length, width) before rotation, in float32 or float64.

        >>> cos, sin = torch.tensor([[0.6, 0.6]]), torch.tensor([[0.8, 0.8]])
        >>> rotated = torch.tensor([[[[-0.2, 1.4, 5.0]]]])          # (1, 1) turned, and a part that is not
        >>> Inverse("halves", False, False, 1).apply(rotated, (cos, sin)).flatten()
        tensor([1., 1., 5.])
        """
        cosine, sine = self._factors(angles, compute_dtype(key.dtype))
        key, width = key.to(cosine.dtype), cosine.shape[-1]
        rest = key.shape[-1] - width
        part = key if not rest else key[..., rest:] if self.last else key[..., :width]
        if self.neighbours:
            partner = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = part.roll(width // 2, -1)
        part = torch.addcmul(part * cosine, partner, sine)
        if not rest:
            return part
        return torch.cat([key[..., :rest], part] if self.last else [part, key[..., width:]], dim=-1)

    def _factors(self, angles: Angles, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the factors of a coordinate and of its partner; computed once for all layers."""
        first = angles if isinstance(angles, Tensor) else angles[0]
        known: dict[Any, tuple[Tensor, Tensor]] = first.__dict__.setdefault("unsoft_inverse", {})
        if (self, dtype) not in known:
            known[self, dtype] = self._computed(*_cos_sin(angles), dtype)
        return known[self, dtype]

    def _computed(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = (self._each_pair(x.detach().to(dtype)) for x in (cos, sin))
        # Scaled embeddings (yarn) multiply both by one factor, so the inverse divides by its square.
        squares = cos.square() + sin.square()
        cos, sin = cos / squares, self.sign * sin / squares
        if self.neighbours:
            factors = cos.repeat_interleave(2, -1), torch.stack([sin, -sin], -1).flatten(-2)
        else:
            factors = torch.cat([cos, cos], -1), torch.cat([sin, -sin], -1)
        return factors if cos.dim() == 2 else tuple(x.unsqueeze(1) for x in factors)  # type: ignore[return-value]

    def width(self, angles: Angles) -> int:
        """Return the number of rotated coordinates."""
        width = _cos_sin(angles)[0].shape[-1]
        return 2 * width if self.layout == "whole" else width

    def _each_pair(self, x: Tensor) -> Tensor:
        if self.layout == "whole":
            return x
        return x[..., : x.shape[-1] // 2] if self.layout == "halves" else x[..., ::2]


_INVERSES = [
    Inverse(*form)
    for form in itertools.product(("halves", "pairs", "whole"), (False, True), (False, True), (1, -1))
]


class KeyRotation:
    """Rotation that an attention module applies to its keys, found by its first call."""

    def __init__(self, module: nn.Module, label: str) -> None:
        self.label, self.kind = label, type(module).__name__
        self.known = False
        self.inverse: Inverse | None = None
        """None if the keys are not rotated."""
        self.probed: list[Tensor] | None = None
        """During the first call, the keys that reach the attention function."""

    def angles(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Angles | None:
        """Return the angles of all keys of a call of the module, once the inverse is known; None if keys are
        not rotated."""
        angles: Angles | None = options.get(_ARGUMENT)
        if angles is None:
            angles = inspect.signature(module.forward).bind(*args, **options).arguments.get(_ARGUMENT)
        if not self.known:
            if angles is None:
                raise ValueError(_refusal(self.label, self.kind, f"it got no {_ARGUMENT}"))
            if torch.compiler.is_exporting():
                raise ValueError(
                    f"export: {self.label!r} compares keys before rotary embedding, whose form the first call"
                    " of the model finds; call it once, then export it"
                )
            self._find_inverse(module, args, options, angles)
        if self.inverse is None or angles is None:
            return None
        cache = next((options[name] for name in _CACHES if name in options), None)
        if cache is None or getattr(cache, "hands_on_new_keys", False):
            return angles
        return _with_earlier(cache, module.layer_idx, angles)  # type: ignore[arg-type]

    def undo(self, key: Tensor, angles: Angles) -> Tensor:
        """Return the keys before rotation."""
        assert self.inverse is not None
        length = _cos_sin(angles)[0].shape[-2]
        if key.shape[2] != length:
            raise ValueError(
                f"swap: {self.label!r} compares keys before rotary embedding, and {self.kind} got the angles"
                f" of {length} of its {key.shape[2]} keys; fill a cache by the swapped model only, or pass"
                " use_cache=False"
            )
        return self.inverse.apply(key, angles)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _find_inverse(
        self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], angles: Angles
    ) -> None:
        without_cache = options | dict.fromkeys(options.keys() & set(_CACHES))
        call = inspect.signature(module.forward).bind(*args, **without_cache)
        first = next(iter(call.arguments))
        hidden = call.arguments[first]
        # Any states would do, but the random generator must not move on.
        wave = torch.arange(hidden.numel(), device=hidden.device).mul(0.7).sin() + 0.1
        call.arguments[first] = wave.view(hidden.shape).to(hidden.dtype)
        original = self._keys(module, call, _turned(angles, None))
        for layout in ("halves", "pairs"):
            turned = _turned(angles, layout)
            rotated = self._keys(module, call, turned)
            if torch.equal(rotated, original):
                call.arguments[first] = -call.arguments[first]
                if torch.equal(self._keys(module, call, turned), original):
                    raise ValueError(_refusal(self.label, self.kind, "its keys are those of another layer"))
                self.known = True
                return
            cos = _cos_sin(turned)[0]
            if rotated.shape[2] != cos.shape[-2] or cos.dim() not in (2, 3):
                break
            errors = {
                inverse: float((inverse.apply(rotated, turned) - original).abs().max())
                for inverse in _INVERSES
                if inverse.width(turned) <= rotated.shape[-1]
            }
            best = min(errors, key=errors.__getitem__)
            # A few roundings of the keys; a wrong form is off by the size of a key.
            if errors[best] <= 16 * torch.finfo(rotated.dtype).eps * float(original.abs().max()):
                self.inverse, self.known = best, True
                return
        raise ValueError(_refusal(self.label, self.kind, "some keys are not rotated, or changed after that"))

    def _keys(self, module: nn.Module, call: inspect.BoundArguments, angles: Angles) -> Tensor:
        """Return the keys that a call of the module with these angles hands to the attention function."""
        call.arguments[_ARGUMENT] = angles
        self.probed = []
        try:
            module.forward(*call.args, **call.kwargs)
            return torch.cat(self.probed, dim=2)
        finally:
            self.probed = None


def key_rotation(module: nn.Module, label: str) -> KeyRotation | None:
    """Return the rotation of a module's keys, None if it has none; raise ValueError if cos and sin do not
    reach it.

    >>> from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Config
    >>> key_rotation(GPT2Attention(GPT2Config()), "density") is None
    True
    """
    if not any("apply_" in name and ("rot" in name or "rope" in name) for name in _names(module)):
        return None
    if _ARGUMENT not in inspect.signature(module.forward).parameters or not passes_keywords(module):
        raise ValueError(_refusal(label, type(module).__name__, "it computes the angles itself"))
    return KeyRotation(module, label)


def probing(module: nn.Module) -> bool:
    """Return True during the calls by which :class:`KeyRotation` tries an attention module."""
    rotation = getattr(getattr(module, "unsoft", None), "rotation", None)
    return rotation is not None and rotation.probed is not None


def _names(module: nn.Module) -> tuple[str, ...]:
    return forward_code(type(module)).co_names


def _refusal(label: str, kind: str, reason: str) -> str:
    return (
        f"swap: {label!r} compares keys before rotary embedding, and that of {kind} cannot be undone:"
        f" {reason}; use a mechanism that does not compare keys there"
    )


def _with_earlier(cache: Any, layer: int, angles: Angles) -> Angles:
    """Append the angles of new keys to those of the keys that a cache of transformers holds, rotated."""
    kept: dict[int, Any] = cache.__dict__.setdefault("unsoft_angles", {})
    seen = cache.get_seq_length(layer)
    if seen and layer in kept:  # after a crop there are fewer keys than angles
        angles = tree_map(lambda new, old: torch.cat([old[..., :seen, :], new], dim=-2), angles, kept[layer])
    kept[layer] = angles
    return angles


def _cos_sin(angles: Angles) -> tuple[Tensor, Tensor]:
    return (angles.real, angles.imag) if isinstance(angles, Tensor) else angles


def _turned(angles: Angles, layout: str | None) -> Angles:
    """Return angles of the same shape that differ between all pairs; None: all are 0."""
    cos = _cos_sin(angles)[0]
    length, width = cos.shape[-2:]
    rows, pairs = (torch.arange(n, device=cos.device) for n in (length, -(-width // 2)))
    turns = torch.zeros(length, width, device=cos.device)
    if layout is not None:
        each = 0.3 + 2.4 * (0.37 * rows[:, None] + 0.618 * pairs).frac()
        turns = (each.repeat(1, 2) if layout == "halves" else each.repeat_interleave(2, -1))[:, :width]
    turns = turns.expand(cos.shape)
    if isinstance(angles, Tensor):
        return torch.polar(torch.ones_like(turns), turns).to(angles.dtype)
    return turns.cos().to(cos.dtype), turns.sin().to(cos.dtype)
