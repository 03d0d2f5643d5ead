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
