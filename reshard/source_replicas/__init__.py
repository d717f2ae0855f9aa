"""Checks of a source strategy against the bytes in the files, before anything is written."""

from reshard.source_replicas.compare import ReplicaCheck
from reshard.source_replicas.contradictions import hint_of_swap
from reshard.source_replicas.sources import DamagedSourcesError, SourceChecks, damaged_files
