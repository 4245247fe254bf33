"""Whose certificates are believed: the system's authorities, one file's, or a server's very own.

The system's are OpenSSL's: SSL_CERT_FILE and SSL_CERT_DIR name others. Nothing here turns verification off.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from toolkit.errors import InputError

HINT = "SSL_CERT_FILE=ca.pem names the authority that signed it"


def trust(authorities: Path | None = None) -> ssl.SSLContext:
    """Believe the authorities in a file and no others, or by default the system's. `InputError` for a file of none."""
    try:
        return ssl.create_default_context(cafile=authorities)
    except ssl.SSLError:
        reason = "no certificate in it"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    raise InputError(f"{authorities}: {reason}", "it holds certificates of authorities, in PEM")


def trust_itself(certificate: Path) -> ssl.SSLContext:
    """Believe the server that shows this very certificate, under whatever name it was reached."""
    context = trust(certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever signed it
    return context


def verify(url: str, certificate: Path | None = None) -> ssl.SSLContext | bool:
    """httpx's argument of that name; `certificate` is the server's own, where it is known."""
    if not url.startswith("https:"):
        return False  # there is nothing to verify, and reading the authorities takes its time
    return trust_itself(certificate) if certificate else trust()


def distrusted(error: BaseException) -> str:
    """Why a certificate was not believed; '' where something else failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {cause.verify_message.rstrip('.')}"
        cause = cause.__cause__ or cause.__context__
    return ""
