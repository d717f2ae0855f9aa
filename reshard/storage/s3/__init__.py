"""Object stores that speak S3's protocol: Amazon's, Huawei's OBS, MinIO, Ceph and others.

Uses boto3, which reads credentials and settings from the usual places.
"""

from __future__ import annotations

from reshard.storage.s3.address import Address
from reshard.storage.s3.store import S3Store, s3_store

__all__ = ["Address", "S3Store", "s3_store"]
