"""What a lecture runs in: one thread, no network, nobody's own start-up files.

A notebook's kernel inherits the environment of whoever starts it, and runs the start-up files of
`IPYTHONDIR`: that is where the network is closed, and where a sabotage comes in.
"""

from __future__ import annotations

import os
from pathlib import Path

_FIXED = {
    "OMP_NUM_THREADS": "1",  # numbers are added in one order
    "PYTHONHASHSEED": "0",
    "TQDM_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
_CLOSE_NETWORK = "from minifer.course.book.environment import close_network\nclose_network()\n"


def lecture_environment(folder: Path, startup: str = "") -> dict[str, str]:
    """Variables for a kernel, and in `folder` the start-up files they point to.

    startup: Python that runs in the kernel before the first cell.
    """
    files = folder / "profile_default" / "startup"
    files.mkdir(parents=True, exist_ok=True)
    (files / "00-network.py").write_text(_CLOSE_NETWORK, encoding="utf-8")
    (files / "10-startup.py").write_text(startup, encoding="utf-8")
    return {**os.environ, **_FIXED, "IPYTHONDIR": str(folder)}


def close_network() -> None:
    """From now on this process connects to itself only. For lectures, which need no network."""
    import socket

    connect = socket.socket.connect

    def local_only(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else "localhost"
        if host not in ("localhost", "127.0.0.1", "::1"):
            raise OSError(f"a lecture needs no network, but connects to {host}")
        return connect(self, address)  # type: ignore[arg-type]

    socket.socket.connect = local_only  # type: ignore[method-assign,assignment]
