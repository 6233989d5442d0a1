"""The built-in chat page."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from minifer.serving.errors import APIError

PAGE = Path(__file__).parent / "static" / "chat.html"
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


async def page(_: Request) -> Response:
    """The route. The page may run its own script and talk to this server; nothing else."""
    if not PAGE.is_file():
        raise APIError(404, "this installation has no chat page", code="unknown_route")
    text = PAGE.read_text(encoding="utf-8")
    scripts = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in _SCRIPT.findall(text)
    ]
    policy = (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)
