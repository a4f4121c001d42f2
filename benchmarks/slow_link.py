"""The gradient reduction over a link of limited bandwidth: two network namespaces of this machine, joined by a shaped pair of devices.

    sudo python benchmarks/slow_link.py --mbit 5 20 --elements 1048576 --csv OUT.csv

Needs Linux, root, `ip` and `tc`. Runs `benchmarks/reduce.py` with one gloo process in each namespace for each rate, and writes
its rows with the rate. Where the link is slow enough, times stand to each other as the bytes do; the rest is the arithmetic
of the CPU, and the waiting of each collective for the one before.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SPACES = ("octavo-a", "octavo-b")


def ip(*arguments: str, space: str | None = None, check: bool = True) -> None:
    """Run `ip`, or any command inside a namespace."""
    command = ["ip", "netns", "exec", space, *arguments] if space else ["ip", *arguments]
    subprocess.run(command, check=check, stderr=None if check else subprocess.DEVNULL)


def connect(mbit: float) -> None:
    """Two namespaces with the addresses 10.77.0.1 and 10.77.0.2, each sending at most `mbit` megabits a second."""
    disconnect()
    for space in SPACES:
        ip("netns", "add", space)
    ip("link", "add", "octavo0", "type", "veth", "peer", "name", "octavo1")
    for number, space in enumerate(SPACES):
        device = f"octavo{number}"
        ip("link", "set", device, "netns", space)
        ip("ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", device, space=space)
        ip("ip", "link", "set", device, "up", space=space)
        ip("ip", "link", "set", "lo", "up", space=space)
        shape = ["rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"]
        ip("tc", "qdisc", "add", "dev", device, "root", "tbf", *shape, space=space)


def disconnect() -> None:
    """Remove the namespaces, and with them their devices."""
    for space in SPACES:
        ip("netns", "del", space, check=False)


def measure(elements: list[int], repeats: int) -> list[dict[str, str]]:
    """The rows of `reduce.py` over the link."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rows.csv"
        script = Path(__file__).with_name("reduce.py")
        command = [sys.executable, str(script), "--repeats", str(repeats), "--csv", str(table), "--elements"]
        command += map(str, elements)
        processes = []
        for rank, space in enumerate(SPACES):
            settings = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1}
            settings |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": f"octavo{rank}"}
            environment = os.environ | {name: str(value) for name, value in settings.items()}
            processes.append(subprocess.Popen(["ip", "netns", "exec", space, *command], env=environment))
        if any(process.wait() for process in processes):
            sys.exit("a process failed")
        return list(csv.DictReader(table.open()))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[5.0, 20.0])
    parser.add_argument("--elements", type=int, nargs="+", default=[2**20])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", default="slow_link.csv")
    arguments = parser.parse_args()
    rows = []
    try:
        for mbit in arguments.mbit:
            connect(mbit)
            rows += [{"mbit": str(mbit), **row} for row in measure(arguments.elements, arguments.repeats)]
    finally:
        disconnect()
    with open(arguments.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
