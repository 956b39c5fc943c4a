"""What needs vLLM itself is collected where it is installed (`make test-vllm`)."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_engine_*.py"]

# A worker takes whole files: one that began the longest last would be waited for.
FIRST = ["test_engine_server.py", "test_engine_families.py"]


def pytest_collection_modifyitems(items):
    order = {name: place - len(FIRST) for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, 0))
