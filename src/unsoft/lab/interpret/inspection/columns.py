"""The measures of a head in words, for tables and maps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    name: str
    title: str
    help: str


COLUMNS = (
    Column("sink_share", "sink share", "share of all attention that goes to the one token that gets most"),
    Column("sink_mass", "first token", "share of attention on the first token"),
    Column(
        "hijack_excess", "hijack excess", "attention on crowds of look-alike keys, less what they are worth"
    ),
    Column("hijack_attention", "on crowds", "attention on crowds of look-alike keys"),
    Column("hijack_magnitude", "crowds' worth", "share of crowds in the magnitude of the keys"),
    Column(
        "deletion_share",
        "deletion",
        "of what is moved along the sources' own directions, the part that is removed",
    ),
    Column("deletion_amount", "deleted", "multiples of a source that a row removes altogether"),
    Column("deletion_strength", "per deletion", "mean multiple of a source that one deleting entry removes"),
    Column("effective_keys", "effective keys", "exp(entropy): how many keys a row really uses"),
    Column("participation", "participation", "how many keys carry the bulk of the weight"),
    Column("entropy", "entropy", "entropy of the sizes, in nats"),
    Column("sparsity", "flatness S", "mean |a| / root mean square: 1 is flat"),
    Column("top_mass", "top key", "share of the largest weight of a row"),
    Column(
        "distance_to_uniform", "to uniform", "share of the mass that would have to move to make the row flat"
    ),
    Column("negative_share", "negative", "share of the mass that subtracts"),
    Column("row_sum", "row sum", "sum of the weights"),
    Column("cancellation", "cancelled", "how much positive and negative weights take from each other"),
    Column("magnitude", "magnitude", "effective number of different keys"),
    Column(
        "magnitude_per_key",
        "magnitude/key",
        "effective number of different keys, divided by the number of keys",
    ),
    Column("groups_per_key", "groups/key", "groups of look-alike keys, of the number of keys"),
    Column("pattern_similarity", "twin pattern", "cosine to the most similar head of the layer"),
    Column(
        "parameter_similarity", "twin weights", "cosine of the output projection to the most similar head's"
    ),
)
TITLES = {column.name: column for column in COLUMNS}
