"""What needs vLLM itself is collected where it is installed (`make test-vllm`)."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_engine_*.py"]
