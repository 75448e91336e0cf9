"""Where there is no sandbox, nothing is run with less. What it holds is tested in test_hostile.py."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tandem.errors import SandboxError
from tandem.ports import Limits
from tandem.sandbox import isolated
from tandem.sandbox.isolated import IsolatedSandbox


def test_a_machine_without_namespaces_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(isolated.__file__).with_name("launcher.py").read_text()
    broken = source.replace(
        '_unshare("ns",', 'raise _FailedError("unshare ns: EPERM (Operation not permitted)")\n        _unshare("ns",'
    )
    assert broken != source
    (tmp_path / "launcher.py").write_text(broken)
    monkeypatch.setattr(isolated, "_LAUNCHER", tmp_path / "launcher.py")
    program = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    with pytest.raises(SandboxError, match=r"gives no sandbox \(unshare ns: EPERM .*\): it needs Linux .*; sandbox=process runs"):
        asyncio.run(IsolatedSandbox().run(program, {}, Limits()))
    assert not (tmp_path / "ran").exists()
