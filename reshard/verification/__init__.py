"""Proof of what a checkpoint holds, by a road that shares no code with the conversion.

`fingerprints` sums every parameter in a way that no layout, format or step changes; `compare_trees`
and `compare_replicas` find out which rank holds something else than it should. Strategies and files
are read by the rooms that conversions use too; what they mean for each other is worked out anew here.
"""

from reshard.verification.compare import compare_converted, compare_trees
from reshard.verification.completeness import Needs, check_complete
from reshard.verification.copies import compare_copies, compare_replicas, has_copies, not_held
from reshard.verification.crcs import RecordedCrcs, read_sound
from reshard.verification.difference import Difference
from reshard.verification.fingerprint import Entry, Fingerprints, digest_of, fingerprints
from reshard.verification.reading import Means, Progress
from reshard.verification.steps import read_step
from reshard.verification.tree import Tree, read_tree

__all__ = [
    "Difference",
    "Entry",
    "Fingerprints",
    "Means",
    "Needs",
    "Progress",
    "RecordedCrcs",
    "Tree",
    "check_complete",
    "compare_converted",
    "compare_copies",
    "compare_replicas",
    "compare_trees",
    "digest_of",
    "fingerprints",
    "has_copies",
    "not_held",
    "read_sound",
    "read_step",
    "read_tree",
]
