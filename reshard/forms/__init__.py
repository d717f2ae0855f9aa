"""Forms of checkpoints, a folder each: recognised, read, written and described."""

FORM_CLASSES = {
    "ranks": "ranks.form:RanksForm",
    "hyper-parallel": "dcp.form:HyperParallelForm",
    "dcp": "dcp.form:DcpForm",
    "hf-sharded": "hf_sharded.form:HfShardedForm",
    "checkpoint2": "checkpoint2.form:Checkpoint2Form",
    "unified": "full.form:UnifiedForm",
    "huggingface": "full.form:HuggingFaceForm",
}
"""Module and class of every form that is read and written, by its name. Help needs only the names.

The first form that recognises a source reads it. An unrecognised source is of the first form in this table.
"""

READ_ONLY_CLASSES = {"verl": "verl.form:VerlForm"}
"""Likewise of forms that are only read; `registry.FORMS` loads both, these last."""

SHORT_NAMES = {"hf": "huggingface"}
"""Other names of forms, for options."""
