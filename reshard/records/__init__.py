"""What a target directory says of the conversion that fills it: its identity, what is done, the manifest."""

from reshard.records.identity import Identity, SourceFile, header_digest, source_file, strategy_digest
from reshard.records.ledger import DoneRecord, Ledger
from reshard.records.manifest import MANIFEST_NAME, Manifest, ManifestFile, read_manifest

__all__ = [
    "MANIFEST_NAME",
    "DoneRecord",
    "Identity",
    "Ledger",
    "Manifest",
    "ManifestFile",
    "SourceFile",
    "header_digest",
    "read_manifest",
    "source_file",
    "strategy_digest",
]
