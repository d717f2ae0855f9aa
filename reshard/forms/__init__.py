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
"""Module and class of every form, by its name; `registry.FORMS` loads them. Help needs only the names.

The first form that recognises a source reads it. An unrecognised source is of the first form in this table.
"""

SHORT_NAMES = {"hf": "huggingface"}
"""Other names of forms, for options."""
