#!/usr/bin/env bash
# Runs paceline.sbatch without Slurm: three tasks on this machine.
#
#   packaging/slurm/try.sh BINARY MODEL
#
# srun and scontrol are stand-ins that do what the script asks of them and no more.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin" "$work/job"
cat >"$work/bin/scontrol" <<'STUB'
#!/bin/sh
echo 127.0.0.1
STUB
cat >"$work/bin/srun" <<'STUB'
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
trap 'kill $(jobs -p); wait' TERM
for task in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done
wait
STUB
chmod +x "$work/bin/"*
free=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1] // 8 * 8)')
export PATH=$work/bin:$PATH PACELINE=$1 PACELINE_JOB_DIR=$work/job PACELINE_PORT=$free
export SLURM_NTASKS=3 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=localhost SLURM_SUBMIT_DIR=$work
body='{"model": "'$2'", "prompt": "The sky is", "max_tokens": 8, "temperature": 0}'
# A node hears of an instance of another owner a moment later: until then it answers 503.
ask="curl -sS --fail-with-body --retry 20 --retry-delay 1 http://127.0.0.1:$free/v1/completions -H 'Content-Type: application/json' -d '$body'"
bash "$here/paceline.sbatch" "$2" "$ask" | tee "$work/said"
grep -q '"finish_reason"' "$work/said"
