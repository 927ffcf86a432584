"""Hosts simulated on one machine: network namespaces with names, addresses and cables of their own.

    with Hosts(2) as hosts:                                     # node0 10.77.0.1, node1 10.77.0.2
        process = hosts.start(0, ["python", "-m", "..."])
        hosts.cut(1)                                            # its cable is unplugged, until hosts.mend(1)
        hosts.kill(1)                                           # all of its processes, at once

            node0                node1
            eth0                 eth0          each end of a cable is limited to RATE, and delayed where
              |                    |           this kernel has netem
              +------ bridge ------+

Everything lives in the namespaces of a few processes that wait for the end of their standard input. When this process
ends, in whatever way, they end, and the namespaces with them. Needs Linux, the commands unshare, nsenter, ip and tc,
and either root or user namespaces (https://man7.org/linux/man-pages/man7/user_namespaces.7.html).

The file system, the clock and the processor are shared. So is /dev/shm, as between containers that share it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RATE, DELAY = "2gbit", "0.1ms"  # of a cable, in each direction
_COMMANDS = ("unshare", "nsenter", "ip", "tc")
_HEADERS = 14 + 20 + 32  # bytes of Ethernet, IPv4 and TCP with a timestamp, of each packet


class NoHosts(RuntimeError):
    """This machine does not allow what simulated hosts need."""


class Traffic(NamedTuple):
    """Bytes, with all headers, and packets that a host has sent over its cable."""

    sent_bytes: int
    packets: int

    def __sub__(self, other: Traffic) -> Traffic:  # type: ignore[override]
        return Traffic(*(a - b for a, b in zip(self, other, strict=True)))

    @property
    def payload(self) -> int:
        """Bytes that programs have sent: acknowledgements have none."""
        return self.sent_bytes - _HEADERS * self.packets


def traffic_here() -> Traffic:
    """Return the traffic of the host that this process is on. Not from /sys, which shows the host where it was mounted.

    Columns: https://man7.org/linux/man-pages/man5/proc_pid_net.5.html
    """
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    columns = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
    return Traffic(int(columns[8]), int(columns[9]))


class Hosts:
    """``count`` hosts at one bridge.

    Attributes:
        addresses: of the hosts.
        delayed: whether their cables have a delay.

    Raises:
        NoHosts: this machine does not allow it; the text says why.
    """

    def __init__(self, count: int) -> None:
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self.delayed = False
        self._processes: list[subprocess.Popen[str]] = []
        self._keepers: list[subprocess.Popen[str]] = []
        if missing := [name for name in _COMMANDS if shutil.which(name) is None]:
            raise NoHosts(f"the commands {', '.join(missing)} are missing; install iproute2 and util-linux")
        try:
            self._keep(["unshare", *_user("--user", "--map-root-user"), "--net"], "all")
            _ip("link add bridge type bridge mcast_snooping 0", self._inside(0))
            _ip("link set bridge mtu 9000 up", self._inside(0))
            for number in range(count):
                self._plug_in(number)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, host: int, command: Sequence[str], log: IO[str] | None = None, **env: str) -> subprocess.Popen[str]:
        """Start a command on a host, in the root of the repository. ``log`` gets its output."""
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
        process = subprocess.Popen(
            [*self._inside(host + 1), *command], cwd=ROOT, env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT if log else None, start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def torchrun(
        self, ranks: int, program: Sequence[str], logs: Path, hosts: Sequence[int] | None = None, **env: str
    ) -> list[subprocess.Popen[str]]:
        """Start one agent of scripts/launch/torchrun on each host (on ``hosts``), with so many ranks each. The agents
        meet on the first of them, and write to ``logs/nodeN.log``. ``env``: settings of the script, as RESTARTS."""
        numbers = list(range(len(self.addresses))) if hosts is None else list(hosts)
        env |= {"HOSTS": str(len(numbers)), "HEAD": self.addresses[numbers[0]], "RANKS": str(ranks)}
        env |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        command = [str(ROOT / "scripts" / "launch" / "torchrun"), "--monitor-interval", "0.1", "--local-addr"]
        agents = []
        for place, number in enumerate(numbers):
            with open(logs / f"node{number}.log", "a") as log:
                whole = [*command, self.addresses[number], *program]
                agents.append(self.start(number, whole, log, **{**env, "HOST": str(place)}))
        return agents

    def cut(self, host: int) -> None:
        """Unplug the cable of a host: packets are lost, connections stay."""
        _ip(f"link set port{host} down", self._inside(0))

    def mend(self, host: int) -> None:
        _ip(f"link set port{host} up", self._inside(0))

    def processes(self, host: int) -> list[int]:
        """Return the processes on a host."""
        keeper = self._keepers[host + 1].pid
        here = os.readlink(f"/proc/{keeper}/ns/net")
        numbers = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # not a process, of another user, or it has ended
                if folder.name.isdigit() and os.readlink(folder / "ns" / "net") == here:
                    numbers.append(int(folder.name))
        return sorted(set(numbers) - {keeper})

    def kill(self, host: int) -> None:
        """Kill all processes of a host."""
        while numbers := [number for number in self.processes(host) if _alive(number)]:
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

    def close(self) -> None:
        """End all that runs on the hosts, and the hosts."""
        for host in range(len(self._keepers) - 1):
            self.kill(host)
        for process in self._processes:
            process.wait(600)
        for keeper in reversed(self._keepers):
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            keeper.stdin.close()
            keeper.wait(600)
            keeper.stdout.close()
        self._processes, self._keepers = [], []

    def _keep(self, command: Sequence[str], name: str) -> None:
        """Start a process that keeps new namespaces, and wait until they are there."""
        shell = ["sh", "-c", 'if [ "$0" != all ]; then hostname "$0"; fi && echo ready && exec cat', name]
        pipe = subprocess.PIPE
        keeper = subprocess.Popen([*command, *shell], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        with keeper.stderr as errors:
            if keeper.stdout.readline() != "ready\n":
                raise NoHosts(f"{' '.join(command)} is not allowed: {errors.read().strip()}")

    def _plug_in(self, number: int) -> None:
        self._keep([*self._inside(0), "unshare", "--net", "--uts"], f"node{number}")
        keeper, inside = self._keepers[-1].pid, self._inside(number + 1)
        _ip(f"link add port{number} type veth peer name eth0 netns {keeper}", self._inside(0))
        _ip(f"link set port{number} mtu 9000 master bridge up", self._inside(0))
        _ip(f"address add {self.addresses[number]}/24 dev eth0", inside)
        _ip("link set eth0 mtu 9000 addrgenmode none up", inside)
        _ip("link set lo up", inside)
        limit = [*inside, "tc", "qdisc", "add", "dev", "eth0", "root"]
        netem = [*limit, "netem", "delay", DELAY, "rate", RATE, "limit", "10000"]
        self.delayed = subprocess.run(netem, capture_output=True).returncode == 0
        if not self.delayed:  # this kernel has no netem
            _done([*limit, "tbf", "rate", RATE, "burst", "256kb", "latency", "100ms"])

    def _inside(self, keeper: int) -> list[str]:
        """Return the beginning of a command that runs in the namespaces of a keeper: 0 of the bridge."""
        names = ["--net", *(["--uts"] if keeper else [])]
        return ["nsenter", f"--target={self._keepers[keeper].pid}", *_user("--user", "--preserve-credentials"), *names]


def _user(*options: str) -> list[str]:
    """Return options that only processes without root need: a user namespace in which they are root."""
    return [] if os.geteuid() == 0 else list(options)


def _ip(arguments: str, inside: Sequence[str]) -> None:
    _done([*inside, "ip", *arguments.split()])


def _done(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoHosts(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@functools.cache
def why_not() -> str:
    """Return why this machine can have no simulated hosts, or ""."""
    if sys.platform != "linux":
        return "simulated hosts need the network namespaces of Linux"
    try:
        Hosts(1).close()
    except NoHosts as error:
        return f"simulated hosts: {error}"
    return ""
