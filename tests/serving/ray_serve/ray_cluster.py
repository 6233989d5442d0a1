"""A Ray cluster of several nodes, each in processes of its own on this machine, for tests.

Run as a program, so that nothing of Ray lives in the test process: it prints `{"address": …}` and
then answers one line of JSON a command on standard input.

    add            one more worker node
    kill NODE_ID   that node and all that runs on it dies, as in a power cut
    nodes          the ids of the live worker nodes
    (the end)      all nodes are shut down
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

MEGABYTE = 1024**2
SETTINGS = {
    "num_cpus": 1,  # one replica a node
    "include_dashboard": False,
    "include_log_monitor": False,
    "object_store_memory": 80 * MEGABYTE,  # 75 is the least that Ray takes
}


def say(**fields: Any) -> None:
    print(json.dumps(fields), file=ANSWERS, flush=True)


def main(num_workers: int) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"no_monitor": True, **SETTINGS})
    try:
        workers = {}

        def add() -> str:
            node = cluster.add_node(**SETTINGS)
            workers[node.node_id] = node
            return str(node.node_id)

        for _ in range(num_workers):
            add()
        say(address=cluster.address)
        for line in sys.stdin:
            command, *rest = line.split()
            if command == "add":
                say(node=add())
            elif command == "kill":
                cluster.remove_node(workers.pop(rest[0]), allow_graceful=False)
                say(killed=rest[0])
            else:
                say(nodes=list(workers))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    # What Ray prints goes to standard error; standard output is for the answers.
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(int(sys.argv[1]))
