"""Translates errors of the S3 client into loaderkit's: which kind, for which object, and what to do.

The client's text is never shown and never chained, because it quotes answers of the store, which quote tokens and keys.
Only the status, the store's error code and the name of the transport's error are taken from it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
_TRANSPORT = re.compile(r"\b(AWS_[A-Z0-9_]{3,80}|botocore\.\w{3,80})\b")


class _Rule(NamedTuple):
    """An error's kind, what it is recognised by (a code or transport error, a status, or words), and its message."""

    kind: type[ConnectorError]
    names: str
    statuses: tuple[int, ...]
    words: str
    message: str


_RULES = (
    _Rule(
        ExpiredCredentialsError,
        r"ExpiredToken|ExpiredTokenException|TokenRefreshRequired|RequestExpired|AWS_ERROR_S3_TOKEN_EXPIRED"
        r"|botocore\.(SSOTokenLoad|UnauthorizedSSOToken|TokenRetrieval|CredentialRetrieval|RefreshWithMFAUnsupported)Error",
        (),
        r"token .{0,40}expired",
        "the credentials have expired: renew them (a new session token, `aws sso login`) and resume",
    ),
    _Rule(
        AccessDeniedError,
        r"AWS_AUTH_CREDENTIALS\w*|botocore\.(No|Partial)CredentialsError|botocore\.ProfileNotFound",
        (),
        r"no signing credentials",
        "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role; for a public "
        "bucket say `s3: {{anonymous: true}}`",
    ),
    _Rule(
        AccessDeniedError,
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken",
        (),
        r"signature we calculated|access key id you provided|token .{0,30}(invalid|malformed)",
        "{store} does not accept the credentials: key, secret or token are wrong, or belong to another store",
    ),
    _Rule(
        AccessDeniedError,
        r"RequestTimeTooSkewed|AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED",
        (),
        r"request time and the server",
        "this machine's clock is wrong, so its signatures are not accepted: set the clock",
    ),
    _Rule(
        ObjectNotFoundError,
        r"NoSuchBucket",
        (),
        r"bucket does not exist",
        "there is no such bucket at {store}; check `url`, `s3.region` and `s3.endpoint`",
    ),
    _Rule(
        ObjectNotFoundError,
        r"NoSuchKey",
        (404,),
        r"object was not found|key does not exist",
        "there is no such object; was it moved or deleted?",
    ),
    _Rule(ShortReadError, r"InvalidRange", (416,), r"(?!)", "the object ends before the range asked for"),
    _Rule(
        ObjectChangedError,
        r"PreconditionFailed|AWS_ERROR_S3_OBJECT_MODIFIED",
        (412,),
        r"precondition failed",
        "it was replaced while it was read; start again, so that it is listed again",
    ),
    _Rule(
        ConnectorError,
        r"PermanentRedirect|TemporaryRedirect|AuthorizationHeaderMalformed",
        (301, 307),
        r"wrong region",
        "the bucket is in another region than requested ({store}): set `s3.region`",
    ),
    _Rule(
        AccessDeniedError,
        r"AccessDenied|AllAccessDisabled",
        (401, 403),
        r"client error: forbidden",
        "{store} denies access with these credentials: check them, and the bucket's policy",
    ),
    _Rule(
        ThrottledError,
        r"SlowDown|ServiceUnavailable|Throttling|ThrottlingException|TooManyRequests|RequestLimitExceeded|AWS_ERROR_S3_SLOW_DOWN",
        (429, 503),
        r"throttled",
        "{store} asks for fewer requests: lower `s3.connections`, or make reads larger",
    ),
    # An error document with status 200 in answer to a GET (always of a range) or a HEAD. The client says nothing of the
    # document; in answers to other requests it reads the code itself.
    _Rule(
        ThrottledError,
        r"AWS_ERROR_S3_MISSING_CONTENT_RANGE_HEADER",
        (),
        r'header "[\w-]+" not found',
        "{store} answered with status 200 and an error document, as stores do under load (SlowDown, InternalError); if it "
        "always does, it is no S3 store, or a proxy drops headers: is `s3.endpoint` right?",
    ),
    _Rule(TemporaryError, r"InternalError|AWS_ERROR_S3_INTERNAL_ERROR", (500, 502, 504), r"(?!)", "{store} failed"),
    _Rule(
        TemporaryError,
        r"RequestTimeout|AWS_ERROR_S3_REQUEST_TIMEOUT",
        (408,),
        r"(?!)",
        "{store} timed out waiting for this client",
    ),
    _Rule(
        TemporaryError,
        r"AWS_ERROR_S3_RESPONSE_CHECKSUM_MISMATCH",
        (),
        r"(?!)",
        "{store} sent bytes that do not fit their checksum",
    ),
    _Rule(
        TemporaryError,
        r"BadDigest|InvalidDigest|XAmzContentSHA256Mismatch|XAmzContentChecksumMismatch",
        (),
        r"(?!)",
        "{store} received other bytes than were sent: they were damaged on the way",
    ),
    _Rule(
        TruncatedError,
        r"AWS_ERROR_HTTP_CONNECTION_CLOSED|AWS_IO_SOCKET_CLOSED|AWS_ERROR_HTTP_SERVER_CLOSED",
        (),
        r"(?!)",
        "{store} closed the connection early",
    ),
    _Rule(
        UnreachableError,
        r"AWS_IO_\w+|AWS_ERROR_HTTP\w*"
        r"|botocore\.(EndpointConnection|ConnectionClosed|ConnectTimeout|ReadTimeout|ProxyConnection|SSL|HTTPClient|\w*Streaming)\w*",
        (),
        r"(?!)",
        "no connection with {store}: is the endpoint right, and up?",
    ),
    _Rule(
        ConnectorError,
        r"(?!)",
        (),
        r"internal s3 client error",
        "{store} answers as no S3 store does: is `s3.endpoint` right?",
    ),
    _Rule(ConnectorError, r".*", (), r"", "the request failed at {store}"),
)


def translate(text: str, where: str, store: str) -> ConnectorError:
    """The error for a failed request. `where` names the object or listing, `store` the endpoint."""
    code, transport = _first_match(_CODE, text), _first_match(_TRANSPORT, text)
    status = int(_first_match(_STATUS, text) or 0)
    details = ", ".join(filter(None, (f"status {status}" if status else "", code, transport)))
    rule = next(rule for rule in _RULES if _fits(rule, text, (code, transport), status))
    return rule.kind(f"{where}: {rule.message.format(store=store)}{f' ({details})' if details else ''}")


def _fits(rule: _Rule, text: str, names: tuple[str, str], status: int) -> bool:
    is_named = any(name and re.fullmatch(rule.names, name) for name in names)
    return is_named or status in rule.statuses or re.search(rule.words, text, re.IGNORECASE) is not None


def _first_match(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match is not None else ""
