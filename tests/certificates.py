"""Certificates for tests of TLS, made when they are needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(directory: Path, name: str) -> dict[str, str]:
    """Make a certificate that vouches for itself, and its key; Dask's configuration of them, as variables."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    directory.mkdir(parents=True, exist_ok=True)
    certificate, key = str(directory / f"{name}.pem"), str(directory / f"{name}-key.pem")
    created = [
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
        "-keyout",
        key,
        "-out",
        certificate,
    ]
    subprocess.run(["openssl", "req", "-x509", *created], check=True, capture_output=True)
    tls = {"CA_FILE": certificate}
    for role in ("SCHEDULER", "WORKER", "CLIENT"):
        tls[f"{role}__CERT"], tls[f"{role}__KEY"] = certificate, key
    return {f"DASK_DISTRIBUTED__COMM__TLS__{option}": path for option, path in tls.items()}
