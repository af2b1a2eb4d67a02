#!/bin/bash
# Run on both nodes, with HEAD the address of the first. Survives a lost rank: torchrun starts all again, they resume.
set -euo pipefail
HEAD=${1:?address of the first node}

torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id llama-1b --rdzv-endpoint "$HEAD:29400" \
    -m fourfold train configs/llama-1b.toml --plan plan.toml --train.run-dir /shared/llama-1b
