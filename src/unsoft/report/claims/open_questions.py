"""Claims whose evidence needs training or changes inside a trained model; they say so instead of guessing."""

from __future__ import annotations

from unsoft.report.claims.claim import Claim

_TRAINING = "needs trained models; no study has been run"
_SURGERY = "needs interventions inside a trained model, which this version cannot make"
CLAIMS = (
    Claim("repulsion", "000", "Repulsive attention keeps heads from collapsing into one another.", "claims", needs=_TRAINING),
    Claim("entropy-neurons", "000", "Entropy neurons write into the null space of the unembedding and act through the layer norm.", "claims", needs=_SURGERY),
    Claim("frequency-neurons", "000", "Token-frequency neurons move logits along the unigram distribution.", "claims", needs=_SURGERY),
    Claim("steering", "000", "Steering the latent space reduces hallucinated objects.", "claims", needs=_SURGERY),
    Claim("trained-cog", "000", "Models with negative weights perform better once trained.", "claims", needs=_TRAINING),
    Claim("trained-linear", "001", "Linear attention's worse results come from its poor focus.", "claims", needs=_TRAINING),
    Claim("trained-magnitude", "002", "A learned gate uses magnitude only where it helps.", "claims", needs=_TRAINING),
)  # fmt: skip
