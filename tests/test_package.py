"""What importing does and does not do, and registration by `import torch` alone."""

import os
import subprocess
import sys

import pytest


def run(code, **env):
    """`code` in a fresh interpreter; what it printed on stdout and stderr together."""
    return subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        env={**os.environ, **env},
    ).stdout.strip()


LOADED = "import sys; print([name for name in ('torch', 'triton', 'click') if name in sys.modules])"
KNOWN = "import torch.distributed as dist; print('r4d' in dist.Backend.backend_list)"


@pytest.mark.parametrize("module", ["tp3", "tp3.comm", "tp3.comm.select", "tp3.comm.layout"])
def test_import_needs_no_torch(module):
    assert run(f"import {module}; {LOADED}") == "[]"


@pytest.mark.parametrize(
    "first", ["", "import tp3; ", "import tp3.comm; ", "import tp3.comm; tp3.comm.register(); "]
)
def test_import_torch_registers(first):
    assert run(first + KNOWN) == "True"


def test_registration_loads_no_triton():
    assert run(f"import torch; {LOADED}") == "['torch']"


def test_register_by_hand_where_autoload_is_off():
    code = "import tp3.comm; tp3.comm.register(); tp3.comm.register(); "
    assert run(KNOWN, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"
    assert run(code + KNOWN, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "True"


def test_a_failing_registration_does_not_break_import_torch():
    code = "import sys; sys.modules['tp3.comm'] = None; import torch; print(torch.ones(2).tolist())"
    output = run(code)
    assert "the r4d backend is not available: ModuleNotFoundError" in output
    assert output.endswith("[1.0, 1.0]")
