"""The certificate that the server shows, where it speaks TLS itself: read, checked, and replaced while it runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from toolkit.errors import InputError
from toolkit.serve.rereading import Source

PEM_HINT = "--ssl-certfile and --ssl-keyfile are PEM files, the certificate before those of its authorities"


def certificate_source(certificate: Path, key: Path | None) -> Source[ssl.SSLContext]:
    """The two files as a context for a listener; without `key`, the key is in the certificate's file.

    `InputError` where they cannot be read, do not belong together, or the key has a passphrase.
    """
    return Source([certificate, *([key] if key else [])], lambda: _read(certificate, key))


class Certificate:
    """A context to listen with. Connections made after `renew` get the newer certificate; older ones go on."""

    def __init__(self, source: Source[ssl.SSLContext]) -> None:
        self.context = self._now = source.value
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake, whether or not the client names a host."""
        connection.context = self._now

    def renew(self, context: ssl.SSLContext) -> str:
        """Another certificate from now on, whole: a pair of files that is half new never gets here. What to say."""
        self._now = context
        return "the certificate was read again"


def _read(certificate: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    for file in (certificate, key or certificate):
        try:
            file.open("rb").close()  # OpenSSL does not say which one it cannot read
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror}", PEM_HINT) from None

    def refuse_passphrase() -> str:
        raise InputError(
            f"{key or certificate}: the key has a passphrase", "openssl pkey -in KEY -out PLAIN takes it off"
        )

    try:
        context.load_cert_chain(certificate, key, refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"{key or certificate}: not the key of the certificate {certificate}", PEM_HINT) from None
        where = certificate if key is None else f"{certificate} and {key}"
        raise InputError(f"{where}: no certificate and its key", PEM_HINT) from None
    return context
