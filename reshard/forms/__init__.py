"""Forms of checkpoints, a folder each: recognised, read, written and described."""

FORM_CLASSES = {
    "ranks": "reshard.forms.ranks.form:RanksForm",
    "hyper-parallel": "reshard.forms.pytorch.form:HyperParallelForm",
    "megatron": "reshard.forms.megatron.form:MegatronForm",
    "dcp": "reshard.forms.pytorch.form:DcpForm",
    "hf-sharded": "reshard.forms.pytorch.form:HfShardedForm",
    "checkpoint2": "reshard.forms.checkpoint2.form:Checkpoint2Form",
    "unified": "reshard.forms.full.form:UnifiedForm",
    "huggingface": "reshard.forms.full.form:HuggingFaceForm",
}
"""Module and class of every form that is read and written, by its name. Help needs only the names.

The first form that recognises a source reads it; later ones are not loaded.
"""

READ_ONLY_CLASSES = {"verl": "reshard.forms.pytorch.form:VerlForm"}
"""Likewise of forms that are only read; they come last."""

DEFAULT_FORM = next(iter(FORM_CLASSES))
"""The form of an unrecognised source."""

SHORT_NAMES = {"hf": "huggingface"}
"""Other names of forms, for options."""
