#!/usr/bin/env bash
# llama3-70b: 64 hosts x 8 GPUs, 1 process(es) a host. Start it with `sbatch < FILE`.
# Rendered by `meshkit launch`; ready to be edited.
#SBATCH --job-name=llama3-70b
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --time=2-00:00:00

python=python3
out=runs/llama3-70b
num_processes=64
devices_per_process=0
max_restarts=3
command=("$python" -m meshkit train configs/experiments/llama3_70b.toml --out runs/llama3-70b)
make_certificates=("$python" -m meshkit launch certificates)
srun_options=(--kill-on-bad-exit=1 --cpu-bind=none --ntasks=64)

first_host() { scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1; }

# Every process sees all GPUs of its host, which NVLink needs, and drives its own.
# shellcheck disable=SC2016
process='
  export MESHKIT_PROCESS_ID="$SLURM_PROCID"
  if [ "$DEVICES_PER_PROCESS" -gt 0 ]; then
    first=$((SLURM_LOCALID * DEVICES_PER_PROCESS))
    MESHKIT_LOCAL_DEVICE_IDS="$(seq -s , "$first" "$((first + DEVICES_PER_PROCESS - 1))")"
    export MESHKIT_LOCAL_DEVICE_IDS
  fi
  exec "$@"'

start() { exec srun "${srun_options[@]}" --output="$LOGS/rank%t.log" bash -c "$process" bash "${command[@]}"; }

preempted() {
  scontrol requeue "$SLURM_JOB_ID"
  exit 75
}

export MESHKIT_MTLS="$out/mtls-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
on_first_host() { srun "${srun_options[@]}" --nodes=1 --ntasks=1 --nodelist="$(first_host)" "$@"; }

# Certificates of this start alone, in a folder of the shared file system that only this user can open.
mkdir -p "$out" || exit 2
on_first_host "${make_certificates[@]}" "$MESHKIT_MTLS" --host "$(first_host)" || exit 2
trap 'rm -rf -- "$MESHKIT_MTLS"' EXIT

# Ports above Linux's ephemeral ones; a new one for every attempt, as the last attempt may still hold its own.
set -u -o pipefail
told=0 gang=

forward() {
  told=1
  if [ -n "$gang" ]; then kill -TERM "$gang" 2>/dev/null; fi
}
trap forward TERM

last_step() {
  local step
  step="$(tail -n 5 "$out/metrics.jsonl" 2>/dev/null | grep -o '"step": [0-9]\{1,12\}' | tail -n 1 | grep -o '[0-9]*$')"
  echo "${step:-0}"
}

mkdir -p "$out/logs" || exit 2
attempt=0 best="$(last_step)" fruitless=0 restarts=0

while true; do
  until LOGS="$out/logs/attempt$attempt" && mkdir "$LOGS" 2>/dev/null; do # of whoever makes it, alone
    [ -e "$LOGS" ] || mkdir "$LOGS" || exit 2
    attempt=$((attempt + 1))
  done
  MESHKIT_COORDINATOR="$(first_host):$((61000 + RANDOM % 4000))"
  MESHKIT_NUM_PROCESSES="$num_processes" MESHKIT_ATTEMPT="$attempt" DEVICES_PER_PROCESS="$devices_per_process"
  export LOGS MESHKIT_COORDINATOR MESHKIT_NUM_PROCESSES MESHKIT_ATTEMPT DEVICES_PER_PROCESS
  start &
  gang=$!
  wait "$gang"
  status=$?
  while kill -0 "$gang" 2>/dev/null; do # a signal ends `wait`, not the gang
    wait "$gang"
    status=$?
  done
  gang=
  echo "meshkit: attempt $attempt ended with $status; logs in $LOGS" >&2
  case "$status" in
    0 | 2 | 3 | 130) exit "$status" ;; # done, or nothing that a restart mends
  esac
  if [ "$status" -eq 75 ] || [ "$told" -eq 1 ]; then preempted; fi
  reached="$(last_step)"
  if [ "$reached" -gt "$best" ]; then best="$reached" fruitless=0; else fruitless=$((fruitless + 1)); fi
  if [ "$fruitless" -ge 2 ]; then
    echo "meshkit: $fruitless attempts in a row have reached no step after $best" >&2
    exit 4
  fi
  if [ "$restarts" -ge "$max_restarts" ]; then
    echo "meshkit: all $max_restarts restarts are used up" >&2
    exit 4
  fi
  restarts=$((restarts + 1)) attempt=$((attempt + 1))
done
