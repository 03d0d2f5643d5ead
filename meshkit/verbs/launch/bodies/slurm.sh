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
