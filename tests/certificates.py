"""Certificates that sign themselves, by the openssl program, for servers on this machine."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl program to make certificates"
)


def self_signed(folder: Path, name: str, host: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A certificate, which is its own authority, and its key."""
    certificate = folder / f"{name}.pem"
    key = folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName={host}", "-days", "2"]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    return certificate, key


def listening(certificate: Path, key: Path) -> ssl.SSLContext:
    """For a server that shows it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
