"""Records of a conversion in its target directory: what is asked, progress, manifest."""

from reshard.records.ledger import DoneRecord, Ledger, header_digest
from reshard.records.manifest import MANIFEST_NAME, FinishingRecord, Manifest, read_manifest
from reshard.records.record import Record, strategy_digest
from reshard.records.sources import SourceFile, source_files
