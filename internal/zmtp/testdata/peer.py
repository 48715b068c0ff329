"""A libzmq peer for the interop tests.

peer.py echo KIND [--heartbeat IVL,TIMEOUT,TTL]
    binds a ROUTER (KIND "router") or DEALER on a free port, prints the port, and echoes every message until
    its standard input is closed.
peer.py ask KIND PORT [--identity NAME] [--heartbeat ...] [--idle SECONDS] [--count N]
    connects a REQ or DEALER, sends messages of many shapes to an echoing ROUTER and compares the echoes.
    --idle waits before the last message and fails if the connection was lost meanwhile.
    --count N sends N messages before it reads any echo (DEALER).
"""
import argparse
import hashlib
import sys
import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

SHAPES = [
    [b"hello"],
    [b""],
    [b"a", b"", b"c"],
    [b"x" * 255],
    [b"x" * 256],
    [b"head", bytes(range(256)) * 4096, b"tail"],  # 1 MiB in the middle
    [b"y" * 70000, b"z" * 65536],
    [bytes([i]) for i in range(60)],
]


def options(sock, args):
    sock.linger = 0
    sock.rcvtimeo = 20000
    sock.sndtimeo = 20000
    if args.heartbeat:
        ivl, timeout, ttl = (int(x) for x in args.heartbeat.split(","))
        sock.setsockopt(zmq.HEARTBEAT_IVL, ivl)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout)
        sock.setsockopt(zmq.HEARTBEAT_TTL, ttl)


def echo(ctx, args):
    sock = ctx.socket({"router": zmq.ROUTER, "dealer": zmq.DEALER}[args.kind])
    options(sock, args)
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    print(port, flush=True)
    # closing our standard input is told to the loop through a pair of inproc sockets
    stop = ctx.socket(zmq.PAIR)
    stop.bind("inproc://stop")

    def watch():
        sys.stdin.read()
        s = ctx.socket(zmq.PAIR)
        s.connect("inproc://stop")
        s.send(b"")
        s.close()

    threading.Thread(target=watch, daemon=True).start()
    poller = zmq.Poller()
    poller.register(sock, zmq.POLLIN)
    poller.register(stop, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if stop in ready:
            return
        if sock in ready:
            sock.send_multipart(sock.recv_multipart())


def ask(ctx, args):
    sock = ctx.socket({"req": zmq.REQ, "dealer": zmq.DEALER}[args.kind])
    options(sock, args)
    if args.identity:
        sock.identity = args.identity.encode()
    monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    sock.connect(f"tcp://127.0.0.1:{args.port}")

    def ask_one(parts):
        sock.send_multipart(parts)
        got = sock.recv_multipart()
        if got != parts:
            raise SystemExit(f"sent {digest(parts)}, got back {digest(got)}")

    for parts in SHAPES:
        ask_one(parts)
    for i in range(args.count):
        sock.send_multipart([str(i).encode()])
    for i in range(args.count):
        if sock.recv_multipart() != [str(i).encode()]:
            raise SystemExit(f"echo {i} came out of order")
    if args.idle and monitor.poll(args.idle * 1000):
        raise SystemExit(f"connection lost while idle: {recv_monitor_message(monitor)}")
    ask_one([b"last"])
    if monitor.poll(0):
        raise SystemExit(f"connection lost: {recv_monitor_message(monitor)}")
    sock.disable_monitor()
    sock.close()
    print("ok", flush=True)


def digest(parts):
    return [(len(p), hashlib.sha256(p).hexdigest()[:8]) for p in parts]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("mode", choices=["echo", "ask"])
    p.add_argument("kind")
    p.add_argument("port", nargs="?")
    p.add_argument("--identity")
    p.add_argument("--heartbeat")
    p.add_argument("--idle", type=float, default=0)
    p.add_argument("--count", type=int, default=0)
    args = p.parse_args()
    ctx = zmq.Context()
    {"echo": echo, "ask": ask}[args.mode](ctx, args)
    ctx.destroy(linger=0)


main()
