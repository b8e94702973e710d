"""A run on the machines of a hostfile, which share this folder, over ssh.

    python scripts/hosts.py HOSTFILE run --model Qwen3-8B --head eagle3 --minutes 600

A line of the file is `host` or, as DeepSpeed writes it, `host slots=8`. Every machine starts the same command with its
own number in this folder; the first one is the master. Where one fails, the others are stopped.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

_LINE = re.compile(r"(?P<host>[\w.@:-]+)(\s+slots=(?P<slots>\d+))?")


def read_hosts(path: Path) -> list[tuple[str, str | None]]:
    """Return (host, slots) of every line; comments and empty lines don't count."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            sys.exit(f"{path}:{number}: {text!r} is no host: write `host` or `host slots=8`")
        found.append((match["host"], match["slots"]))
    if not found:
        sys.exit(f"{path} names no host")
    return found


def command_on(rank: int, hosts: list[tuple[str, str | None]], arguments: list[str], master: str) -> list[str]:
    """Return the ssh command of machine `rank`."""
    host, slots = hosts[rank]
    line = [".venv/bin/draftsmith", *arguments, "--nnodes", str(len(hosts)), "--node-rank", str(rank)]
    line += ["--master", master, *(["--gpus", slots] if slots else [])]
    return ["ssh", "-o", "BatchMode=yes", host, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(line)}"]


def main() -> int:
    """Start all machines, show what they say, stop all when one fails; returns the first exit status that isn't 0."""
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    hosts, arguments = read_hosts(Path(sys.argv[1])), sys.argv[2:]
    master = os.environ.get("MASTER") or hosts[0][0].rpartition("@")[2]
    started = [
        subprocess.Popen(command_on(i, hosts, arguments, master), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for i in range(len(hosts))
    ]
    readers = [
        threading.Thread(target=_show, args=(host, process), daemon=True)
        for (host, _), process in zip(hosts, started, strict=True)
    ]
    for reader in readers:
        reader.start()
    failed = 0
    try:
        while not failed and any(process.poll() is None for process in started):
            time.sleep(0.2)
            failed = next((process.returncode for process in started if process.poll()), 0)
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            process.wait()
    for reader in readers:
        reader.join(timeout=5)
    return failed or next((process.returncode for process in started if process.returncode), 0)


def _show(host: str, process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{host}: {line.decode(errors='replace').rstrip()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
