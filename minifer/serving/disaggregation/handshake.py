"""Both sides prove that they know the token, without saying it.

::

    receiver                                   sender
             ◀── nonce ──────────────────────
             ─── request, nonce, proof ─────▶
             ◀── answer, proof ──────────────

A proof is an HMAC-SHA256 over both nonces and the message it stands in: it is worth nothing in
another conversation, and the message cannot be changed on its way. What follows is not protected
against somebody who can write into the connection; put such links into a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable

from minifer.serving.disaggregation.frames import Fields, Link, LinkError, text_of

Reply = Callable[[Fields], Awaitable[None]]


class NotAuthenticatedError(LinkError):
    """The other side does not know the token."""


async def ask(link: Link, token: str, request: Fields) -> Fields:
    """The receiver's side: send a request, return the answer. Raises as `Link` does, and
    `NotAuthenticatedError`."""
    greeting, _ = await link.receive()
    theirs, own = text_of(greeting, "nonce"), secrets.token_hex(16)
    proof = _proof(token, "request", theirs, own, request)
    await link.send({"message": request, "nonce": own, "proof": proof})
    answer, _ = await link.receive()
    message = answer.get("message")
    _check(answer, _proof(token, "answer", theirs, own, message))
    if not isinstance(message, dict):
        raise LinkError("the answer is no object")
    return message


async def listen(link: Link, token: str) -> tuple[Fields, Reply]:
    """The sender's side: a request, and how to answer it. Raises as `ask` does."""
    own = secrets.token_hex(16)
    await link.send({"nonce": own})
    fields, _ = await link.receive()
    theirs, request = text_of(fields, "nonce"), fields.get("message")
    _check(fields, _proof(token, "request", own, theirs, request))
    if not isinstance(request, dict):
        raise LinkError("the request is no object")

    async def reply(message: Fields) -> None:
        proof = _proof(token, "answer", own, theirs, message)
        await link.send({"message": message, "proof": proof})

    return request, reply


def _proof(token: str, kind: str, senders: str, receivers: str, message: object) -> str:
    text = json.dumps([kind, senders, receivers, message], sort_keys=True)
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def _check(fields: Fields, proof: str) -> None:
    given = fields.get("proof")
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), proof.encode()):
        raise NotAuthenticatedError("the other side does not know the token")
