"""Where learnable mechanisms begin inside a trained model: close to what the model already does.

    magnitude        gates of sigmoid(9) = 0.9999 for every key
    gated            a gate of sigmoid(4) = 0.98, as published
    gpam             l+ = l- = 0.02: 2% is added and 2% subtracted
    differential2    sigmoid(-4) = 0.02 of the second map is subtracted
    sink             exp(-4) = 0.02 joins the mass

Mechanisms that are not listed have one start only.
"""

from __future__ import annotations

from unsoft.mechanisms.core.module import Mechanism


def open_start(mechanism: Mechanism) -> None:
    """Moves every part of a mechanism to its start near the identity, where it has one.

    >>> import unsoft
    >>> layer = unsoft.mechanism("magnitude+sink+softmax", heads=2, head_dim=4)
    >>> open_start(layer)
    >>> layer.gamma, layer.inner.values["sink"]
    (Parameter containing: tensor([9., 9.], requires_grad=True), Parameter containing: tensor([-4., -4.], requires_grad=True))
    """
    for part in mechanism.parts:
        part.open_start()
