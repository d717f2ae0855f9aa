"""Reads all objects of a bucket in large ranges with boto3, with a given concurrency, into one file.

usage: python -m benchmarks.object_reads ENDPOINT THREADS REQUEST_BYTES DIRECTORY OUT

DIRECTORY is what the bucket holds, to know the keys and sizes. Prints the seconds that it took.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
from botocore.config import Config


def main() -> None:
    """Read and write everything."""
    endpoint, threads, request, directory, out = sys.argv[1:]
    client = boto3.client("s3", endpoint_url=endpoint, config=Config(max_pool_connections=64, region_name="us-east-1"))
    root, step = Path(directory), int(request)
    ranges = []
    place = 0
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        size = path.stat().st_size
        ranges += [(str(path.relative_to(root)), at, min(at + step, size), place + at) for at in range(0, size, step)]
        place += size
    target = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def move(one: tuple[str, int, int, int]) -> None:
        key, start, stop, where = one
        done = 0
        response = client.get_object(Bucket="bench", Key=key, Range=f"bytes={start}-{stop - 1}")
        for chunk in response["Body"].iter_chunks(256 << 10):
            done += os.pwrite(target, chunk, where + done)

    begun = time.perf_counter()
    with ThreadPoolExecutor(int(threads)) as pool:
        list(pool.map(move, ranges))
    os.close(target)
    print(time.perf_counter() - begun)


if __name__ == "__main__":
    main()
