"""Two network namespaces, as two hosts, and the link between them, which can be cut or slowed down. This needs root.

eth0 of one namespace <-> its veth peer -> a thread that forwards frames at a given rate -> the other peer <-> eth0
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.213.0.1", "10.213.0.2")
_EVERYTHING, _FRAME_BYTES, _BUFFER_BYTES, _LOOK_S = 3, 65536, 1 << 26, 0.2
# Linux, include/uapi: asm-generic/socket.h, linux/sockios.h, linux/ethtool.h
_SO_RCVBUFFORCE, _SIOCETHTOOL, _OFFLOADS = 33, 0x8946, {"checksums": 0x17, "TCP segments": 0x1F, "segments": 0x24}


class Network:
    """The names of the namespaces, and the link between them."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names
        self.bytes_per_s = float("inf")
        """The rate at which each direction forwards frames."""
        self._ends = False

    def set_link(self, state: str) -> None:
        """Set the link `up` or `down`, at the first namespace."""
        run_ip("-n", self.names[0], "link", "set", "eth0", state)

    @contextmanager
    def forwarded(self, peers: tuple[str, ...]) -> Iterator[None]:
        """Forward frames between two interfaces of this namespace."""
        sockets = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERYTHING)) for _ in peers]
        for each, peer in zip(sockets, peers):
            each.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
            each.bind((peer, 0))
            each.settimeout(_LOOK_S)
        threads = [threading.Thread(target=self._forward, args=way) for way in (sockets, sockets[::-1])]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ends = True
            for thread in threads:
                thread.join()
            for each in sockets:
                each.close()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        free_at = 0.0  # when the link has sent the frames so far
        while not self._ends:
            try:
                frame = source.recv(_FRAME_BYTES)
            except TimeoutError:
                continue
            free_at = max(free_at, time.monotonic()) + len(frame) / self.bytes_per_s
            time.sleep(max(0.0, free_at - time.monotonic()))
            try:
                target.send(frame)
            except OSError:  # The link is down.
                continue


@contextmanager
def two_hosts() -> Iterator[Network]:
    """Yield two namespaces with a link between them, whose ends have the addresses of ADDRESSES."""
    names = tuple(f"meshkit{os.getpid()}-{i}" for i in range(2))
    ends, peers = (tuple(f"mk{os.getpid() % 100000}{side}{i}" for i in range(2)) for side in "ab")
    try:
        for name, end, peer, address in zip(names, ends, peers, ADDRESSES):
            run_ip("netns", "add", name)
            run_ip("link", "add", end, "type", "veth", "peer", "name", peer)
            _send_whole_frames(end)
            run_ip("link", "set", end, "netns", name, "name", "eth0")
            run_ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run_ip("-n", name, "link", "set", device, "up")
            run_ip("link", "set", peer, "promisc", "on", "up")
            hosts = Path("/etc/netns", name, "hosts")  # `ip netns exec` shows it as /etc/hosts: Gloo looks itself up
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        network = Network(names)
        with network.forwarded(peers):
            yield network
    finally:
        for name, peer in zip(names, peers):
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
            subprocess.run(["ip", "link", "del", peer], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def run_ip(*words: str) -> None:
    """Run the command `ip`."""
    subprocess.run(["ip", *words], check=True)


def _send_whole_frames(device: str) -> None:
    """Make the kernel compute checksums and cut segments itself: what a packet socket forwards has no hardware to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for command in _OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            fcntl.ioctl(asked, _SIOCETHTOOL, struct.pack("16sP8x", device.encode(), ctypes.addressof(value)))
