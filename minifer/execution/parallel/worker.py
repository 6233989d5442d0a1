"""A rank that is not 0: `python -m minifer.execution.parallel.worker SOCKET PARENT`.

It computes what rank 0 computes, with its own part of the weights and its own heads' KV, and says
nothing unless it fails. `ranks.py` shows the whole conversation. It ends when rank 0's end of the
socket closes: the system closes it however rank 0 goes, SIGKILL included.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from minifer.config import EngineConfig
from minifer.execution.parallel.loading import load_rank
from minifer.execution.parallel.messages import encoded, receive, step_of
from minifer.execution.parallel.runner import RankRunner
from minifer.execution.parallel.shard import Shard

_LOOK = 2.0  # seconds between looks whether the parent is still there


def build(order: Mapping[str, Any]) -> RankRunner:
    """This rank's runner; `runner.order_for` has written the order."""
    engine = EngineConfig(**order["engine"])
    loaded = load_rank(
        str(engine.model), engine.dtype, engine.device, Shard(order["rank"], order["size"])
    )
    assert engine.num_kv_blocks is not None  # rank 0 has counted
    return RankRunner(loaded.model, engine, engine.num_kv_blocks)


def serve(channel: socket.socket, parent: int | None = None) -> int:
    """Load, meet the others, take part in every step; returns an exit status at the end.

    parent: process whose child this must stay; a fork of the parent may hold the other end open.
    """
    runner: RankRunner | None = None
    try:
        order = receive(channel)
        runner = build(order)
        channel.sendall(encoded({"loaded": True}))
        store = dist.FileStore(_next(channel, parent)["meeting"], order["size"])
        runner.model.group.connect(store, order["timeout"], order["own_gpus"])
        channel.sendall(encoded({"met": True}))
        while True:
            runner.forward(step_of(_next(channel, parent)))
    except EOFError:
        return 0
    except Exception as error:
        with suppress(OSError):  # rank 0 may be the one that is gone
            channel.sendall(encoded({"error": f"{type(error).__name__}: {error}"}))
        return 1
    finally:
        if runner is not None:
            runner.model.group.close()
        channel.close()


def _next(channel: socket.socket, parent: int | None) -> dict[str, Any]:
    while not select.select([channel], [], [], _LOOK)[0]:
        if parent is not None and os.getppid() != parent:
            raise EOFError("the parent is gone")
    return receive(channel)


def main(arguments: Sequence[str]) -> int:
    descriptor, parent = map(int, arguments)
    return serve(socket.socket(fileno=descriptor), parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
