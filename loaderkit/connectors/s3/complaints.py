"""From what the S3 client says to errors of loaderkit: which kind, for which object, and what to do.

The client's own text is never shown and never chained: it quotes answers of the store, and those quote tokens and keys.
What is taken from it is the status, the store's error code and the name of the transport's error.
"""

from __future__ import annotations

import re

from loaderkit.errors import (
    AccessDeniedError,
    ConnectorError,
    ExpiredCredentialsError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    TemporaryError,
    ThrottledError,
    TruncatedError,
    UnreachableError,
)

_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
_STATUS = re.compile(r"(?:response_status|http_status)\D{0,12}(\d{3})")
_TRANSPORT = re.compile(r"\b(AWS_[A-Z0-9_]{3,80})\b")

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "AWS_ERROR_S3_TOKEN_EXPIRED"}
_BUSY = {"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded",
         "BandwidthLimitExceeded", "AWS_ERROR_S3_SLOW_DOWN"}  # fmt: skip
_BROKEN_OFF = {"AWS_ERROR_HTTP_CONNECTION_CLOSED", "AWS_IO_SOCKET_CLOSED", "AWS_ERROR_HTTP_SERVER_CLOSED"}
# Of a HEAD the client keeps no code, of "forbidden" only a sentence.
_WRONG_KEYS = re.compile("signature we calculated|access key id you provided|token .{0,30}(invalid|malformed)", re.IGNORECASE)


def translate(text: str, where: str, store: str) -> ConnectorError:
    """The error for a failed request. `where` names the object or listing, `store` the endpoint and how it was asked."""
    code = _found(_CODE, text)
    status = int(_found(_STATUS, text) or 0)
    transport = _found(_TRANSPORT, text)
    detail = ", ".join(filter(None, (f"status {status}" if status else "", code, transport)))
    shown = f" ({detail})" if detail else ""
    for kind, what in (
        _of_credentials(text, code, status, transport, store),
        _of_object(text, code, status, transport, store),
        _of_the_moment(text, code, status, transport, store),
    ):
        if kind is not None:
            return kind(f"{where}: {what}{shown}")
    return ConnectorError(f"{where}: the request failed at {store}{shown or ' for a reason the client does not tell'}")


Found = tuple[type[ConnectorError] | None, str]


def _of_credentials(text: str, code: str, status: int, transport: str, store: str) -> Found:
    if code in _EXPIRED or transport in _EXPIRED:
        return ExpiredCredentialsError, "the credentials have expired: renew them (aws sso login, a new session token) and resume"
    if "No signing credentials" in text or "AWS_AUTH_CREDENTIALS" in transport:
        return AccessDeniedError, (
            "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role; "
            "for a public bucket say `s3: {anonymous: true}`"
        )
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken") or _WRONG_KEYS.search(text):
        return AccessDeniedError, f"{store} does not accept the credentials: key, secret or token are wrong, or another store's"
    if code == "RequestTimeTooSkewed" or transport == "AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED":
        return AccessDeniedError, "this machine's clock is wrong, so that its signatures are not accepted: set it"
    return None, ""


def _of_object(text: str, code: str, status: int, transport: str, store: str) -> Found:
    lower = text.lower()
    if code == "NoSuchBucket" or "bucket does not exist" in lower:
        return ObjectNotFoundError, f"there is no such bucket at {store}; check `url`, `s3.region` and `s3.endpoint`"
    if code == "NoSuchKey" or status == 404 or "object was not found" in lower or "key does not exist" in lower:
        return ObjectNotFoundError, "there is no such object; was it moved or deleted?"
    if status == 416 or code == "InvalidRange":
        return ShortReadError, "the object ends before the range asked for"
    if status == 412 or code == "PreconditionFailed" or transport == "AWS_ERROR_S3_OBJECT_MODIFIED":
        return ObjectChangedError, "it was replaced while it was read; start again, so that it is listed anew"
    if status in (301, 307) or code == "AuthorizationHeaderMalformed" or "wrong region" in lower:
        return ConnectorError, f"the bucket is in another region than asked for ({store}): set `s3.region`"
    if status in (401, 403) or code in ("AccessDenied", "AllAccessDisabled") or "forbidden" in lower:
        return AccessDeniedError, f"{store} refuses it with these credentials: check them, and what the bucket's policy allows"
    return None, ""


def _of_the_moment(text: str, code: str, status: int, transport: str, store: str) -> Found:
    if status in (429, 503) or code in _BUSY or transport in _BUSY or "throttl" in text.lower():
        return ThrottledError, f"{store} asks for fewer requests: lower `s3.connections`, or make reads larger"
    if status >= 500 or code == "InternalError" or "AWS_ERROR_S3_INTERNAL_ERROR" in transport:
        return TemporaryError, f"{store} failed"
    if transport == "AWS_ERROR_S3_RESPONSE_CHECKSUM_MISMATCH":
        return TemporaryError, f"{store} sent bytes that do not fit their checksum"
    if transport in _BROKEN_OFF:
        return TruncatedError, f"{store} broke off the connection"
    if transport.startswith(("AWS_IO_", "AWS_ERROR_HTTP")):
        return UnreachableError, f"no connection with {store}: is the endpoint right, and up?"
    if "internal s3 client error" in text.lower():
        return ConnectorError, f"{store} answers as no S3 store does: is `s3.endpoint` right?"
    if status == 408 or code == "RequestTimeout" or "TIMEOUT" in transport:
        return TemporaryError, f"{store} gave up waiting for this client"
    return None, ""


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match is not None else ""
