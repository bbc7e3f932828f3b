"""The figures of a neuron in words, for tables and the page."""

from __future__ import annotations

from unsoft.lab.interpret.inspection.columns import Column

COLUMNS = (
    Column(
        "rho", "ρ", "share of its length in the null space, the directions that the unembedding sees least"
    ),
    Column("norm", "norm", "length of its output weights"),
    Column("logit_variance", "LogitVar", "variance over words of the cosine between the neuron and the word"),
    Column("mean_activation", "mean", "mean activation"),
    Column("spread", "spread", "standard deviation of the activation"),
    Column("total", "|Δ loss|", "mean change of the loss at a token when the neuron is set to its mean"),
    Column("direct", "frozen", "the same with the scale of the final norm frozen"),
    Column(
        "mediated_share", "via norm", "share of the change of the loss that is gone with the scale frozen"
    ),
    Column("mediated_q", "q", "chance that matched controls have such a share, corrected for all neurons"),
    Column("mediated_control", "controls", "mean share of the matched controls"),
    Column("entropy_total", "|Δ H|", "mean change of the entropy at a token, in nats"),
    Column("entropy_frozen", "|Δ H| frozen", "the same with the scale of the final norm frozen"),
    Column(
        "entropy_mediated_share",
        "H via norm",
        "share of the change of the entropy that is gone with the scale frozen",
    ),
    Column(
        "entropy_shift",
        "Δ H",
        "mean change of the entropy with its sign: below 0, the neuron holds the model back",
    ),
    Column("loss_shift", "Δ loss", "mean change of the loss with its sign"),
    Column("changed", "other word", "share of tokens where another word becomes the likeliest"),
    Column(
        "frequency_cosine", "cos freq", "cosine between what it reaches and the logarithm of word frequency"
    ),
    Column("frequency_share", "via frequency", "share of the change that is gone with frequency held"),
    Column(
        "frequency_q", "q freq", "chance that matched controls have such a share, corrected for all neurons"
    ),
    Column("kl_total", "|Δ KL|", "mean change of the divergence from word frequencies"),
    Column("kl_held", "|Δ KL| held", "the same with the component along word frequency held"),
    Column(
        "kl_shift",
        "Δ KL",
        "mean change with its sign: below 0, the neuron keeps the model away from frequencies",
    ),
)
TITLES = {column.name: column for column in COLUMNS}
