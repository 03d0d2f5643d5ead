#!/usr/bin/env bash
# llama3-70b: 64 hosts x 8 GPUs, 8 process(es) a host. Start it with `bash FILE`.
# Rendered by `meshkit launch`; ready to be edited.

python=python3
out=runs/llama3-70b
num_processes=512
devices_per_process=1
max_restarts=3
command=("$python" -m meshkit train configs/experiments/llama3_70b.toml --out runs/llama3-70b)
make_certificates=("$python" -m meshkit launch certificates)
hostfile=hosts
mpirun_options=(-np 512 --map-by ppr:8:node --bind-to none -x MESHKIT_MTLS)

first_host() { awk '!/^[[:space:]]*(#|$)/ { print $1; exit }' "$hostfile"; }

# Every process sees all GPUs of its host, which NVLink needs, and drives its own.
# shellcheck disable=SC2016
process='
  export MESHKIT_PROCESS_ID="$OMPI_COMM_WORLD_RANK"
  if [ "$DEVICES_PER_PROCESS" -gt 0 ]; then
    first=$((OMPI_COMM_WORLD_LOCAL_RANK * DEVICES_PER_PROCESS))
    MESHKIT_LOCAL_DEVICE_IDS="$(seq -s , "$first" "$((first + DEVICES_PER_PROCESS - 1))")"
    export MESHKIT_LOCAL_DEVICE_IDS
  fi
  exec "$@" >"$LOGS/rank$OMPI_COMM_WORLD_RANK.log" 2>&1'

start() {
  exec mpirun --hostfile "$hostfile" "${mpirun_options[@]}" \
    -x LOGS -x DEVICES_PER_PROCESS -x MESHKIT_COORDINATOR -x MESHKIT_NUM_PROCESSES -x MESHKIT_ATTEMPT \
    bash -c "$process" bash "${command[@]}"
}

preempted() { exit 75; }

export MESHKIT_MTLS="$out/mtls-$$"
on_first_host() { mpirun --host "$(first_host)" -np 1 "$@"; }

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
