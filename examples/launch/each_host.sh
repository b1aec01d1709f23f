#!/usr/bin/env bash
# A program on several hosts, with torchrun. Start this file on every host, with the same words but for the first:
#
#     examples/launch/each_host.sh 0 2 10.0.0.1 examples/train_gpt.py --plan zero3      on the host with the address 10.0.0.1
#     examples/launch/each_host.sh 1 2 10.0.0.1 examples/train_gpt.py --plan zero3      on the other one
#
# Every host has the same program, the same version of this package and of torch, and the same data.
set -euo pipefail

host=$1       # which host this is, counted from 0: its ranks are host * ranks, ..., host * ranks + ranks - 1, so placements can name them
hosts=$2      # how many hosts there are; the job starts when all of them have come
first=$3      # an address of host 0 that all hosts reach; ranks meet there and learn each other's addresses
shift 3       # what is left is the program and its arguments

ranks=${RANKS_PER_HOST:-2}      # processes on each host: one for each GPU, or for each group of cores
port=${MASTER_PORT:-29500}      # free on host 0 and open to the others; so are the ports that the ranks choose by themselves

# Threads of one rank: without it torch takes all cores in every rank, and they stand in each other's way.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# On a host with several networks, or whose name stands for 127.0.1.1 in /etc/hosts, say by which one ranks reach each other:
#     export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

# --node_rank fixes which ranks a host has. With --rdzv_backend=c10d hosts would get their numbers in the order in which they come.
exec torchrun \
  --nnodes="$hosts" \
  --node_rank="$host" \
  --nproc_per_node="$ranks" \
  --master_addr="$first" \
  --master_port="$port" \
  "$@"
