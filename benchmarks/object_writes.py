"""Uploads all files of a directory to a bucket with boto3's own transfers, with a given concurrency.

usage: python -m benchmarks.object_writes ENDPOINT THREADS PART_BYTES DIRECTORY

Prints the seconds that it took, from the first request on.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config


def main() -> None:
    """Upload everything."""
    endpoint, threads, part, directory = sys.argv[1:]
    config = Config(max_pool_connections=64, request_checksum_calculation="when_required", region_name="us-east-1")
    client = boto3.client("s3", endpoint_url=endpoint, config=config)
    root = Path(directory)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    at_a_time = max(1, int(threads) // max(1, min(len(files), int(threads))))
    transfer = TransferConfig(
        multipart_threshold=int(part), multipart_chunksize=int(part), max_concurrency=at_a_time, use_threads=True
    )
    begun = time.perf_counter()
    with ThreadPoolExecutor(min(len(files), int(threads))) as pool:
        done = [
            pool.submit(client.upload_file, str(path), "bench", f"raw/{path.relative_to(root)}", Config=transfer)
            for path in files
        ]
        for one in done:
            one.result()
    print(time.perf_counter() - begun)


if __name__ == "__main__":
    main()
