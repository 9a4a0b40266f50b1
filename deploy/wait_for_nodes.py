"""Wait until a Ray cluster has this many nodes: python deploy/wait_for_nodes.py ADDRESS COUNT

Exit code 1 after five minutes.
"""

import sys
import time

import ray

WAIT_S = 300


def main(address: str, count: int) -> None:
    ray.init(address=address, logging_level="ERROR")
    ends = time.monotonic() + WAIT_S
    while (alive := sum(node["Alive"] for node in ray.nodes())) < count:
        if time.monotonic() > ends:
            sys.exit(f"{alive} of {count} nodes joined {address} within {WAIT_S} s")
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
