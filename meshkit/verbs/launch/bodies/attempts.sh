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
