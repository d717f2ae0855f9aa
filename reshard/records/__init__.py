"""Records of a conversion in its target directory: identity, progress, manifest."""

from reshard.records.commands import RecordedCommand
from reshard.records.identity import Identity, SourceFile, SourceSampler, header_digest, strategy_digest
from reshard.records.ledger import DoneRecord, Ledger
from reshard.records.manifest import MANIFEST_NAME, FinishingRecord, Manifest, ManifestFile, read_manifest
