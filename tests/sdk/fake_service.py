"""This file is a stand-in for a service of the stack: says where it listens, is healthy, and dies as it is told to.

Run as `fake_service.py NAME FLAGS...`. The environment variable FAKE_<NAME> sets how it behaves: "dies" ends it before it
is ready, "never" keeps it NOT_SERVING, and "deaf" makes it ignore SIGTERM. The flags it got
are the first line of its log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from treewire.testing import Reply, ScriptedService
from treewire.v1 import generate_pb2_grpc

EXIT_STATUS = 3
TEXT = "to be or not to be"
HEALTH_NAMES = {"draft": "DraftService", "verify": "VerifyService", "gateway": "GenerateService"}


def main(name: str, flags: list[str]) -> None:
    """Serves until SIGTERM."""
    behaviour = os.environ.get(f"FAKE_{name.upper()}", "")
    print(json.dumps(flags), file=sys.stderr, flush=True)
    if behaviour == "dies":
        print(f"{name} has no weights", file=sys.stderr, flush=True)
        sys.exit(EXIT_STATUS)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(f"{name}.worker").write_text(str(worker.pid))
    status = health_pb2.HealthCheckResponse.NOT_SERVING if behaviour == "never" else health_pb2.HealthCheckResponse.SERVING
    servicer = health.HealthServicer()
    servicer.set(f"treewire.v1.{HEALTH_NAMES[name]}", status)
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(ScriptedService((Reply.of_text(TEXT),)), server)
    port = server.add_insecure_port(flags[flags.index("--bind") + 1])
    server.start()
    stopping = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" else lambda number, frame: stopping.set())
    print("a line that is not the ready line", flush=True)
    print(json.dumps({"event": "ready", "service": name, "address": f"127.0.0.1:{port}", "pid": os.getpid()}), flush=True)
    stopping.wait()
    server.stop(None).wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
