"""What only trained models can tell: claims that say so instead of
guessing, and an empty column of the scoreboard.
"""

from __future__ import annotations

from unsoft.compare.section import ROSIC, SU, SURVEY, Claim, Column, Section

_TRAINING = "needs trained models; no study has been run"
_SURGERY = "needs interventions inside a trained model, which this version cannot make"
_CLAIMS = (
    ("repulsion", SURVEY, "Repulsive attention keeps heads from collapsing into one another.", _TRAINING),
    (
        "entropy-neurons",
        SURVEY,
        "Entropy neurons write into the null space of the unembedding and act through the layer norm.",
        _SURGERY,
    ),
    (
        "frequency-neurons",
        SURVEY,
        "Token-frequency neurons move logits along the unigram distribution.",
        _SURGERY,
    ),
    ("steering", SURVEY, "Steering the latent space reduces hallucinated objects.", _SURGERY),
    ("trained-cog", SURVEY, "Models with negative weights perform better once trained.", _TRAINING),
    ("trained-linear", SU, "Linear attention's worse results come from its poor focus.", _TRAINING),
    ("trained-magnitude", ROSIC, "A learned gate uses magnitude only where it helps.", _TRAINING),
)
SECTION = Section(
    name="training",
    order=90,
    columns=[
        Column(
            "trained", "trained score", "not run: filled from the store of a study once there is one", None
        )
    ],
    claims=[Claim(name, source, text, needs=needs) for name, source, text, needs in _CLAIMS],
)
