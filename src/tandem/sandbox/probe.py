"""What a sandbox holds on this machine, by trying it: small hostile programs, and what became of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tandem.ports import Limits, Sandbox

_TRIES = {
    "programs run": "print('yes')",
    "no network": "import socket\ntry: socket.create_connection(('127.0.0.1', 9), 1)\nexcept ConnectionRefusedError: pass\n"
    "except OSError: print('yes')",
    "no other processes": "import os\nprint('yes' if sum(name.isdigit() for name in os.listdir('/proc')) <= 2 else '')",
    "no home directory": "import os\ntry: open('HOME'); print('')\nexcept OSError: print('yes')",
    "nothing outside can be written": "try: open('/usr/tandem-was-here', 'w')\nexcept OSError: print('yes')",
    "few processes": "import os, time\ntry:\n  for _ in range(64):\n    if os.fork() == 0: time.sleep(60)\n"
    "except OSError: print('yes')",
    "memory of all together": "import os, time\nprint('yes', flush=True)\nfor _ in range(4):\n  if os.fork() == 0:\n"
    "    x = bytearray(200 << 20)\n    time.sleep(5)\n    os._exit(0)\nfor _ in range(4): os.wait()\nprint('no')",
    "no new namespaces": "import ctypes\nprint('yes' if ctypes.CDLL(None).unshare(0x10000000) else '')",
}


@dataclass(frozen=True)
class Finding:
    """held: whether what is named holds on this machine."""

    name: str
    held: bool


async def probe(sandbox: Sandbox, home_file: str) -> list[Finding]:
    """home_file: one in a home directory that must not be read. Raises SandboxError where nothing can be run at all."""
    found: list[Finding] = []
    for name, source in _TRIES.items():
        program = [sys.executable, "-I", "-c", source.replace("HOME", home_file)]
        outcome = await sandbox.run(program, {}, Limits(wall_s=20.0))
        found.append(Finding(name, outcome.stdout.strip() == "yes"))
    return found
