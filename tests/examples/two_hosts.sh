#!/usr/bin/env bash
# The same command on two hosts, where $HOST is 0 and 1 and $FIRST the address of host 0. The hosts are network namespaces: each has an
# address of its own, and nothing in common but a cable between them.
#
#     sudo tests/examples/two_hosts.sh bash -c 'examples/launch/each_host.sh $HOST 2 $FIRST program.py'
#
# Exit code 77: not possible here, with the reason.
set -euo pipefail

skip() { echo "skipped: $*" >&2; exit 77; }

command -v ip >/dev/null || skip "ip (iproute2) is not installed"
[ "$(id -u)" = 0 ] || skip "network namespaces are made by root"

hosts=("consistent_a_$$" "consistent_b_$$")
cleanup() { for host in "${hosts[@]}"; do ip netns delete "$host" 2>/dev/null || true; done; }
trap cleanup EXIT
for host in "${hosts[@]}"; do
  reason=$(ip netns add "$host" 2>&1) || skip "ip netns add: $reason"
done

ip link add wire netns "${hosts[0]}" type veth peer name wire netns "${hosts[1]}" || skip "no veth devices"
for k in 0 1; do
  ip -n "${hosts[$k]}" address add "192.168.1.$((k + 1))/24" dev wire
  ip -n "${hosts[$k]}" link set lo up
  ip -n "${hosts[$k]}" link set wire up
done

pids=()
for k in 0 1; do
  HOST=$k FIRST=192.168.1.1 GLOO_SOCKET_IFNAME=wire OMP_NUM_THREADS=1 ip netns exec "${hosts[$k]}" "$@" &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
