"""Who may read the dashboard: the codes of links, the tokens of pages, and the headers of requests.

Promises:
  A1  A code opens the dashboard once. The token that it is exchanged for is a new random text.
  A2  After WRONG_MAX wrong codes in WRONG_WITHIN_S no code is accepted until WRONG_WITHIN_S have
      passed. Pages that have a token go on.
  A3  A request is accepted only if its Host is this server's own loopback address, which a name
      that a stranger's DNS server points to 127.0.0.1 is not.
  A4  A request that another site's page makes is refused. Only a click on a link, which loads the
      empty page and no facts, may come from another site.

Codes and tokens compare in constant time. The caller passes the time.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Final

CODES_MAX: Final = 64
"""Unused links that are valid at a time, and tokens likewise. The oldest ends with the next one."""

WRONG_MAX: Final = 10
WRONG_WITHIN_S: Final = 60.0

FRESH_LINK: Final = (
    "Get a new link: `zmqdist dashboard TARGET` prints one, and `cluster.dashboard_url` is one."
)
USED: Final = f"This link has been used, and a link opens the dashboard once. {FRESH_LINK}"
WRONG: Final = f"This link does not belong to this dashboard. {FRESH_LINK}"
TOO_MANY: Final = "Too many wrong links were tried. Wait a minute, then open a new link."
NO_TOKEN: Final = f"This page may not read the dashboard (any more). {FRESH_LINK}"


class Access:
    """The codes and tokens of one dashboard."""

    def __init__(self) -> None:
        self._codes: deque[str] = deque(maxlen=CODES_MAX)
        self._used: deque[str] = deque(maxlen=CODES_MAX)
        self._tokens: deque[str] = deque(maxlen=CODES_MAX)
        self._wrong: deque[float] = deque(maxlen=WRONG_MAX)

    def new_code(self) -> str:
        """Return the code of a new link."""
        code = secrets.token_urlsafe(24)
        self._codes.append(code)
        return code

    def exchange(self, code: str, now: float) -> tuple[str, str]:
        """Return a token for a code and "", or "" and the reason of the refusal."""
        if len(self._wrong) == WRONG_MAX and now - self._wrong[0] < WRONG_WITHIN_S:
            return "", TOO_MANY
        if not _among(code, self._codes):
            self._wrong.append(now)
            return "", USED if _among(code, self._used) else WRONG
        self._codes.remove(code)
        self._used.append(code)
        token = secrets.token_urlsafe(32)
        self._tokens.append(token)
        return token, ""

    def may_read(self, authorization: str) -> bool:
        """Return whether the header `Authorization` of a request has a token."""
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and _among(token, self._tokens)


def refusal(headers: Mapping[str, str], path: str, port: int) -> str:
    """Return why a request is refused because of its headers, or "" if it is not."""
    hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
    if headers.get("host", "") not in hosts:
        return f"The dashboard answers only to http://{hosts[0]}/ and http://{hosts[1]}/."
    site = headers.get("sec-fetch-site", "none")
    click = (
        path == "/"
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
    origin = headers.get("origin", f"http://{hosts[0]}")
    own = origin == f"http://{headers['host']}" or "origin" not in headers
    if not own or not (site in ("none", "same-origin") or click):
        return "The page of another site asked for this, and only the dashboard's own page may."
    return ""


def _among(text: str, texts: deque[str]) -> bool:
    """Return whether a text is one of several, in a time that does not depend on how much of it is
    right."""
    wanted = text.encode(errors="replace")
    return any(hmac.compare_digest(wanted, candidate.encode()) for candidate in texts)
