#!/usr/bin/env bash
# What a machine with three or four GPUs is to show, a GPU for each rank, in one call:
#   bash benchmarks/many_gpus.sh HARDWARE      writes results/*_HARDWARE_DATE.*, e.g. of 4xh200
# PyTorch's own suite comes from elsewhere; vLLM's rows need vLLM beside tp3.
set -uo pipefail
cd "$(dirname "$0")/.."
hardware=$1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
for ranks in $(seq 3 "$gpus"); do
    tp3 bench allreduce --world-size "$ranks" --kib 8,80,256,1024,4096,16384,65536,131072 \
        --timeout 600 --write "$hardware-w$ranks"
    python benchmarks/bench_nq.py --world-size "$ranks" --write "$hardware-w$ranks"
done
python benchmarks/soak_allreduce.py --world-size 3 --device cuda --replays 100000
python -m pytest -v tests/gpu
python benchmarks/bench_vllm.py --write "$hardware" --only \
    three-r4d-1,three-pynccl-1,three-r4d-2,three-pynccl-2
